// Whether this process may use AMX tiles: eight registers of 16 rows x 64 bytes and products of them.
#pragma once

namespace llaisys::device {

// The build has the kernels, the machine has tiles with int8 and bf16 products, the system gave this
// process their state (Linux asks to be asked), and LLAISYS_CPU_AMX is not "off". Found out once,
// before the first weight is laid out.
bool has_amx();

// Whether kernels choose tiles: has_amx(), and nobody said no.
bool uses_amx();

// For tests: uses_amx() from now on, where has_amx() holds. Weights that are laid out already keep
// their format; not to be called while an operator runs.
void allow_amx(bool allowed);

} // namespace llaisys::device
