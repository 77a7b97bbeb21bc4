# libllaisys_cuda: the whole core with CUDA. Python loads it instead of libllaisys for a CUDA device;
# it supports the CPU as well.
#
# Compiled here: src/device/cuda, every *.cu, and the files that dispatch by device
# (LLAISYS_HAVE_CUDA): each operator's op.cpp, device/runtime.cpp, device/host_file.cpp,
# parallel/peer_kernels.cpp and base/nvtx.cpp. All other objects are shared with libllaisys.

file(GLOB_RECURSE LLAISYS_CUDA_SOURCES CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*.cu"
     "${PROJECT_SOURCE_DIR}/src/device/cuda/*.cpp")
set(LLAISYS_DISPATCH_SOURCES ${LLAISYS_BASE_SOURCES})
list(FILTER LLAISYS_DISPATCH_SOURCES INCLUDE REGEX
     "/src/(ops/[^/]+/op|device/runtime|device/host_file|parallel/peer_kernels|base/nvtx)\\.cpp$")

find_package(CUDAToolkit REQUIRED)

add_library(llaisys_cuda_objects OBJECT ${LLAISYS_DISPATCH_SOURCES} ${LLAISYS_CUDA_SOURCES})
target_compile_definitions(llaisys_cuda_objects PRIVATE LLAISYS_BUILD LLAISYS_HAVE_CUDA
                                                        ${LLAISYS_ISA_DEFINITIONS})
target_include_directories(llaisys_cuda_objects PRIVATE "${PROJECT_SOURCE_DIR}/include"
                                                        "${PROJECT_SOURCE_DIR}/src")
target_include_directories(llaisys_cuda_objects SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(llaisys_cuda_objects PRIVATE llaisys_build_flags Threads::Threads)
set_target_properties(llaisys_cuda_objects PROPERTIES POSITION_INDEPENDENT_CODE ON
                                                      CUDA_VISIBILITY_PRESET hidden)

# wgmma kernels are compiled for 90a only; the dispatch needs to know whether they exist.
if("90a" IN_LIST CMAKE_CUDA_ARCHITECTURES OR "90a-real" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  target_compile_definitions(llaisys_cuda_objects PRIVATE LLAISYS_HAVE_SM90A)
endif()

# The objects of libllaisys except those compiled again above.
set(LLAISYS_SHARED_OBJECTS "$<TARGET_OBJECTS:llaisys_objects>")
foreach(pattern "/src/ops/[^/]+/op\\.cpp\\." "/src/device/runtime\\.cpp\\."
                "/src/device/host_file\\.cpp\\." "/src/parallel/peer_kernels\\.cpp\\."
                "/src/base/nvtx\\.cpp\\.")
  set(LLAISYS_SHARED_OBJECTS "$<FILTER:${LLAISYS_SHARED_OBJECTS},EXCLUDE,${pattern}>")
endforeach()
add_library(llaisys_cuda SHARED ${LLAISYS_SHARED_OBJECTS})
target_link_libraries(llaisys_cuda PRIVATE llaisys_cuda_objects CUDA::cudart_static Threads::Threads
                                           ${CMAKE_DL_LIBS} llaisys_build_flags)
llaisys_shared_library(llaisys_cuda)

# Programs that check and time single kernels on a GPU machine: scripts/check_kernels.sh.
option(LLAISYS_CUDA_CHECKS "Build the programs of test/cuda/native" OFF)
if(LLAISYS_CUDA_CHECKS)
  file(GLOB LLAISYS_CUDA_CHECK_SOURCES CONFIGURE_DEPENDS
       "${PROJECT_SOURCE_DIR}/test/cuda/native/check_*.cu")
  foreach(source IN LISTS LLAISYS_CUDA_CHECK_SOURCES)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}" ${LLAISYS_SHARED_OBJECTS})
    target_compile_definitions(${name} PRIVATE LLAISYS_HAVE_CUDA LLAISYS_HAVE_SM90A)
    target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/include"
                                               "${PROJECT_SOURCE_DIR}/src")
    target_include_directories(${name} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(${name} PRIVATE llaisys_cuda_objects CUDA::cudart_static Threads::Threads
                                          ${CMAKE_DL_LIBS} llaisys_build_flags)
  endforeach()
endif()
