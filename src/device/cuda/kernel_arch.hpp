// Architecture of the kernels that the driver loaded for a device.
#pragma once

namespace llaisys::device {

// Major compute capability that the kernels of the current device were compiled for. Lower than
// the device's when the library was built for older architectures only: the driver then compiles
// their PTX, which lacks newer features such as programmatic dependent launch.
int kernel_arch_major();

} // namespace llaisys::device
