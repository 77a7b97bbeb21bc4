// Which of the library's kernels the driver has chosen for a device.
#pragma once

namespace llaisys::device {

// The major compute capability that the kernels of the current device were compiled for. Less than the device's
// where the library was built for older ones alone: then the driver compiles that code anew, and what it does
// not have, such as waiting for a kernel that has let this one in early, it does not get by that.
int loaded_code_major();

} // namespace llaisys::device
