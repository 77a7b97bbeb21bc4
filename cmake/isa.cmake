# Instruction sets by file name. The library contains every path of its architecture and selects one
# at run time, so only the files named here may be compiled for more than the baseline.
#
#   suffix             architecture  compiled with
#   *_avx2.cpp         x86-64        -mavx2 -mfma -mf16c
#   *_avx512.cpp       x86-64        the above, AVX-512 F BW VL DQ; jumps within 32 bytes where the assembler can
#   *_avx512vnni.cpp   x86-64        the above, AVX-512 VNNI
#   *_avx512bf16.cpp   x86-64        the above, AVX-512 BF16
#   *_amx.cpp          x86-64        the above, AMX tile, int8 and bf16
#   *_neon.cpp         aarch64       the baseline (armv8-a)
#   *_neon_dotprod.cpp aarch64       -march=armv8.2-a+dotprod+fp16
#
# Each path of the build defines LLAISYS_HAVE_<AVX2|AVX512|AVX512VNNI|AVX512BF16|AMX|NEON|NEON_DOTPROD>
# for all sources. Files of the other architecture, and of paths that the compiler does not support, are excluded.

include(CheckCXXCompilerFlag)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" _processor)
if(_processor MATCHES "^(x86_64|amd64)$")
  set(LLAISYS_ARCH x86_64)
elseif(_processor MATCHES "^(aarch64|arm64)$")
  set(LLAISYS_ARCH aarch64)
else()
  set(LLAISYS_ARCH generic)
endif()

set(LLAISYS_ISA_PATHS avx2 avx512 avx512vnni avx512bf16 amx neon neon_dotprod) # in link order, see CMakeLists.txt
set(_flags_avx2 -mavx2 -mfma -mf16c)
if(LLAISYS_ARCH STREQUAL x86_64)
  # Cores from Skylake to Cascade Lake do not cache decoded jumps that touch a 32-byte boundary (JCC
  # erratum), which costs register tiles up to a quarter of their speed.
  check_cxx_compiler_flag(-Wa,-mbranches-within-32B-boundaries LLAISYS_ASSEMBLER_PLACES_BRANCHES)
  if(LLAISYS_ASSEMBLER_PLACES_BRANCHES)
    list(APPEND _flags_avx2 -Wa,-mbranches-within-32B-boundaries)
  endif()
endif()
set(_flags_avx512 ${_flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # gcc warns about _mm512_undefined_*() inside its own intrinsics.
  list(APPEND _flags_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(_flags_avx512vnni ${_flags_avx512} -mavx512vnni)
set(_flags_avx512bf16 ${_flags_avx512vnni} -mavx512bf16)
set(_flags_amx ${_flags_avx512bf16} -mamx-tile -mamx-int8 -mamx-bf16)
set(_flags_neon "")
set(_flags_neon_dotprod -march=armv8.2-a+dotprod+fp16)
set(_arch_avx2 x86_64)
set(_arch_avx512 x86_64)
set(_arch_avx512vnni x86_64)
set(_arch_avx512bf16 x86_64)
set(_arch_amx x86_64)
set(_arch_neon aarch64)
set(_arch_neon_dotprod aarch64)

set(LLAISYS_ISA_DEFINITIONS "")
foreach(_path IN LISTS LLAISYS_ISA_PATHS)
  string(TOUPPER "${_path}" _PATH)
  set(LLAISYS_ISA_${_path} OFF)
  if(_arch_${_path} STREQUAL LLAISYS_ARCH)
    set(_supported TRUE)
    if(_flags_${_path})
      string(REPLACE ";" " " _joined "${_flags_${_path}}")
      check_cxx_compiler_flag("${_joined}" LLAISYS_COMPILER_KNOWS_${_PATH})
      set(_supported ${LLAISYS_COMPILER_KNOWS_${_PATH}})
    endif()
    if(_supported)
      set(LLAISYS_ISA_${_path} ON)
      list(APPEND LLAISYS_ISA_DEFINITIONS LLAISYS_HAVE_${_PATH})
    endif()
  endif()
endforeach()

# Split `sources` into those for the baseline and those for an instruction set (in link order),
# and give the latter their flags. A precompiled header is valid for one set of flags: not for these.
function(llaisys_split_isa_sources sources out_base out_isa)
  set(base ${sources})
  set(isa "")
  foreach(path IN LISTS LLAISYS_ISA_PATHS)
    set(matching ${sources})
    list(FILTER matching INCLUDE REGEX "_${path}\\.cpp$")
    list(FILTER base EXCLUDE REGEX "_${path}\\.cpp$")
    if(LLAISYS_ISA_${path})
      list(APPEND isa ${matching})
      if(matching AND _flags_${path})
        set_source_files_properties(${matching} PROPERTIES COMPILE_OPTIONS "${_flags_${path}}"
                                                           SKIP_PRECOMPILE_HEADERS ON)
      endif()
    endif()
  endforeach()
  # -O3 takes three times as long to compile the portable kernels. Every aarch64 machine has NEON: they
  # are for tests there. Results are the same at every level.
  set(portable ${base})
  list(FILTER portable INCLUDE REGEX "kernels_portable\\.cpp$")
  set_source_files_properties(
    ${portable} PROPERTIES COMPILE_OPTIONS "$<IF:$<BOOL:${LLAISYS_ISA_neon}>,-O1,-O2>"
                           SKIP_PRECOMPILE_HEADERS ON)
  set(${out_base} ${base} PARENT_SCOPE)
  set(${out_isa} ${isa} PARENT_SCOPE)
endfunction()
