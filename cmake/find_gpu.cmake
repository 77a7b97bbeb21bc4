# Detect the NVIDIA GPUs of this machine through the driver.
#
#   llaisys_find_gpu(found architectures)
#     found          TRUE if a GPU is present
#     architectures  nvcc architectures, a list without duplicates: 80, 90a, 120, ...; empty when
#                    the driver does not report them
#
# An architecture below 80 is not supported by the kernels and does not count as a GPU.
function(llaisys_find_gpu out_found out_architectures)
  set(found FALSE)
  set(architectures "")
  find_program(LLAISYS_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(LLAISYS_NVIDIA_SMI)
  if(LLAISYS_NVIDIA_SMI)
    execute_process(
      COMMAND "${LLAISYS_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities RESULT_VARIABLE status ERROR_QUIET TIMEOUT 30)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
      foreach(capability IN LISTS capabilities)
        string(REPLACE "." "" architecture "${capability}")
        if(architecture LESS 80)
          continue()
        elseif(architecture EQUAL 90)
          set(architecture 90a) # kernels with wgmma and TMA
        endif()
        list(APPEND architectures ${architecture})
        set(found TRUE)
      endforeach()
      list(REMOVE_DUPLICATES architectures)
    endif()
  elseif(EXISTS /dev/nvidia0)
    set(found TRUE)
  endif()
  set(${out_found} ${found} PARENT_SCOPE)
  set(${out_architectures} "${architectures}" PARENT_SCOPE)
endfunction()

# Find nvcc: on the PATH, else in the folders where the CUDA toolkit is installed.
#
#   llaisys_find_nvcc(nvcc [FOLDER...])
#     nvcc    its path; empty where there is none
#     FOLDER  instead of those of the toolkit
function(llaisys_find_nvcc out_nvcc)
  set(folders ${ARGN})
  if(NOT folders)
    file(GLOB versions /usr/local/cuda-*/bin)
    list(SORT versions COMPARE NATURAL ORDER DESCENDING)
    set(folders /usr/local/cuda/bin /opt/cuda/bin ${versions})
  endif()
  set(nvcc "")
  file(TO_CMAKE_PATH "$ENV{PATH}" path)
  foreach(folder IN LISTS path folders)
    if(NOT nvcc AND EXISTS "${folder}/nvcc" AND NOT IS_DIRECTORY "${folder}/nvcc")
      set(nvcc "${folder}/nvcc")
    endif()
  endforeach()
  set(${out_nvcc} "${nvcc}" PARENT_SCOPE)
endfunction()
