// Which instruction set the CPU kernels use: chosen once per process.
#pragma once

namespace llaisys::device {

enum class Isa { portable, neon, avx2, avx512 };

// The best one of this machine, or the one that LLAISYS_CPU_ISA names. Throws
// LLAISYS_ERROR_UNSUPPORTED when that one is unknown or not available here.
Isa cpu_isa();

// Whether this build has the kernels and this machine the instructions.
bool has_isa(Isa isa);

const char *name_of(Isa isa);

} // namespace llaisys::device
