# Build options and the compile flags that every target shares (target llaisys_build_flags).

if(PROJECT_IS_TOP_LEVEL AND NOT SKBUILD)
  set(_tests_default ON)
else()
  set(_tests_default OFF)
endif()
option(LLAISYS_BUILD_TESTS "Build the C++ unit tests in test/cpp" ${_tests_default})
option(LLAISYS_WERROR "Treat compiler warnings as errors (development and CI)" OFF)
set(LLAISYS_CUDA AUTO CACHE STRING "Build libllaisys_cuda too: ON, OFF, or AUTO: when nvcc is found")
set_property(CACHE LLAISYS_CUDA PROPERTY STRINGS AUTO ON OFF)
# A development build compiles for one kind of GPU: nvcc takes its time for each.
if(_tests_default)
  set(_architectures_default 90a)
else()
  set(_architectures_default 90a 80)
endif()
set(LLAISYS_CUDA_ARCHITECTURES "${_architectures_default}"
    CACHE STRING "GPUs to compile for, a list: 80, 86, 89, 90a, 100, 120, ...")
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
# gives the same bits whatever the compiler and the instruction set. It is a contract.
target_compile_options(
  llaisys_build_flags
  INTERFACE "$<${_host_langs}:-ffp-contract=off;-fno-math-errno;-Wall;-Wextra;-Wpedantic>")
if(LLAISYS_WERROR)
  target_compile_options(llaisys_build_flags INTERFACE "$<${_host_langs}:-Werror>")
endif()

if(LLAISYS_SANITIZE)
  # Sanitized builds carry asserts (no NDEBUG), and any finding ends the program.
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g")
  set(CMAKE_C_FLAGS_RELEASE "-O1 -g")
  set(_sanitize "-fsanitize=${LLAISYS_SANITIZE}" -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(llaisys_build_flags INTERFACE ${_sanitize})
  target_link_options(llaisys_build_flags INTERFACE ${_sanitize})
endif()

# LLAISYS_WITH_CUDA: whether libllaisys_cuda is part of this build.
set(LLAISYS_WITH_CUDA OFF)
if(LLAISYS_SANITIZE OR CMAKE_CROSSCOMPILING)
  # neither goes with nvcc
elseif(LLAISYS_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(LLAISYS_WITH_CUDA ON)
  endif()
elseif(LLAISYS_CUDA)
  set(LLAISYS_WITH_CUDA ON)
endif()
if(LLAISYS_WITH_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES ${LLAISYS_CUDA_ARCHITECTURES})
  if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
endif()
