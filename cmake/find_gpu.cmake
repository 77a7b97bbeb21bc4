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
