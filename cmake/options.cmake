# Build options and the compile flags that every target shares (target llaisys_build_flags).

if(PROJECT_IS_TOP_LEVEL AND NOT SKBUILD)
  set(_tests_default ON)
else()
  set(_tests_default OFF)
endif()
option(LLAISYS_BUILD_TESTS "Build the C++ unit tests in test/cpp" ${_tests_default})
option(LLAISYS_WERROR "Treat compiler warnings as errors (development and CI)" OFF)
set(LLAISYS_CUDA AUTO CACHE STRING
    "Build libllaisys_cuda too: ON, OFF, or AUTO: where both nvcc and a GPU are found")
set_property(CACHE LLAISYS_CUDA PROPERTY STRINGS AUTO ON OFF)
set(LLAISYS_CUDA_ARCHITECTURES "" CACHE STRING
    "GPUs to compile for, a list: 80, 86, 89, 90a, 100, 120, ...; empty: this machine's, or 80 and 90a without one")
set(LLAISYS_SANITIZE "" CACHE STRING "Sanitizers: 'address,undefined', 'thread' or empty")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_C_FLAGS_RELEASE "-O3 -DNDEBUG")

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(llaisys_build_flags INTERFACE)
set(_host_langs "$<COMPILE_LANGUAGE:C,CXX>")
# -ffp-contract=off: a*b+c is rounded twice unless the source says fma, so that every kernel path
# is bitwise identical whatever the compiler and the instruction set. It is a contract.
target_compile_options(
  llaisys_build_flags
  INTERFACE "$<${_host_langs}:-ffp-contract=off;-fno-math-errno;-Wall;-Wextra;-Wpedantic>")
if(LLAISYS_WERROR)
  target_compile_options(llaisys_build_flags INTERFACE "$<${_host_langs}:-Werror>")
endif()

if(LLAISYS_SANITIZE)
  # Sanitized builds have asserts (no NDEBUG), and any finding aborts the program.
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g")
  set(CMAKE_C_FLAGS_RELEASE "-O1 -g")
  set(_sanitize "-fsanitize=${LLAISYS_SANITIZE}" -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(llaisys_build_flags INTERFACE ${_sanitize})
  target_link_options(llaisys_build_flags INTERFACE ${_sanitize})
endif()

# libstdc++ becomes a part of the library: a wheel then depends on the glibc of the machine that built
# it, not on the compiler. Some distributions have no static libstdc++.
if(NOT LLAISYS_SANITIZE AND NOT APPLE)
  include(CheckLinkerFlag)
  check_linker_flag(CXX -static-libstdc++ LLAISYS_LINKS_STATIC_LIBSTDCXX)
endif()

# Use ccache if it is installed and not disabled.
find_program(LLAISYS_CCACHE ccache)
mark_as_advanced(LLAISYS_CCACHE)
if(LLAISYS_CCACHE AND NOT "$ENV{CCACHE_DISABLE}")
  foreach(_language C CXX)
    if(NOT DEFINED CMAKE_${_language}_COMPILER_LAUNCHER)
      set(CMAKE_${_language}_COMPILER_LAUNCHER "${LLAISYS_CCACHE}")
    endif()
  endforeach()
endif()

# LLAISYS_WITH_CUDA: whether libllaisys_cuda is part of this build.
set(LLAISYS_WITH_CUDA OFF)
if(LLAISYS_SANITIZE OR CMAKE_CROSSCOMPILING)
  # not supported with nvcc
elseif(LLAISYS_CUDA)
  include(cmake/find_gpu.cmake)
  llaisys_find_gpu(_gpu_found _gpu_architectures)
  if(NOT LLAISYS_CUDA STREQUAL "AUTO")
    set(LLAISYS_WITH_CUDA ON)
  elseif(NOT _gpu_found)
    message(STATUS "CUDA: off, no GPU found (LLAISYS_CUDA=ON compiles it all the same)")
  else()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(LLAISYS_WITH_CUDA ON)
    else()
      message(STATUS "CUDA: off, a GPU is present but nvcc is not (install the CUDA toolkit to use it)")
    endif()
  endif()
endif()
if(LLAISYS_WITH_CUDA)
  # Architectures: as requested, those of this machine's GPUs, or those of common servers.
  if(LLAISYS_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${LLAISYS_CUDA_ARCHITECTURES})
  elseif(_gpu_architectures)
    set(CMAKE_CUDA_ARCHITECTURES ${_gpu_architectures})
  else()
    set(CMAKE_CUDA_ARCHITECTURES 90a 80)
  endif()
  message(STATUS "CUDA: on, for ${CMAKE_CUDA_ARCHITECTURES}")
  if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
endif()
