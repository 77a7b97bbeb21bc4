// Whether this process may use AMX tiles: eight registers of 16 rows x 64 bytes and products of
// them.
#pragma once

namespace llaisys::device {

// Whether the build has AMX kernels, the machine has tiles with int8 and bf16 products, the
// operating system granted the tile state (Linux requires a request), and LLAISYS_CPU_AMX is not
// "off". Determined once, before the first weight is packed.
bool has_amx();

// Whether kernels use AMX: has_amx(), unless a test disabled it.
bool uses_amx();

// For tests: enable or disable AMX where has_amx() holds. Packed weights keep their format. Must
// not be called while an operator runs.
void allow_amx(bool allowed);

} // namespace llaisys::device
