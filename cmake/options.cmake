# Build options and the compile flags that every target shares (target llaisys_build_flags).

if(PROJECT_IS_TOP_LEVEL AND NOT SKBUILD)
  set(_tests_default ON)
else()
  set(_tests_default OFF)
endif()
option(LLAISYS_BUILD_TESTS "Build the C++ unit tests in test/cpp" ${_tests_default})
option(LLAISYS_WERROR "Treat compiler warnings as errors (development and CI)" OFF)
option(LLAISYS_CUDA "Compile src/**/*.cu and name the library libllaisys_cuda" OFF)
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

if(LLAISYS_CUDA)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
endif()
