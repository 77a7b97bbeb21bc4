// The instruction set of the CPU kernels, selected once per process.
#pragma once

namespace llaisys::device {

enum class Isa { portable, neon, avx2, avx512 };

// The best instruction set of this machine, or the one named by LLAISYS_CPU_ISA. Throws
// LLAISYS_ERROR_UNSUPPORTED when that name is unknown or not available.
Isa cpu_isa();

// Whether this build has the kernels and this machine the instructions.
bool has_isa(Isa isa);

const char *name_of(Isa isa);

} // namespace llaisys::device
