# The build fails where ptxas drops an optimisation (cmake/no_ptxas_loss.sh): tested on a kernel
# where it does, and on one without products. Arguments: NVCC, ROOT (of the repository).
foreach(name serialised plain)
  if(name STREQUAL "plain")
    file(WRITE plain.cu "__global__ void plain(float* out) { out[threadIdx.x] = 1; }\n")
    set(source plain.cu)
  else()
    set(source ${ROOT}/tests/gpu/serialised.cu)
  endif()
  execute_process(
    COMMAND ${ROOT}/cmake/no_ptxas_loss.sh ${NVCC} -gencode=arch=compute_90a,code=sm_90a -cubin
            -o ${name}.cubin ${source}
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE ${name}_status)
  message(STATUS "${name}: status ${${name}_status}\n${output}")
endforeach()
if(NOT serialised_status EQUAL 1 OR NOT plain_status EQUAL 0)
  message(FATAL_ERROR "the notes of ptxas are not what decides")
endif()
