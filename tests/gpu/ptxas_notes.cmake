# ptxas says in notes, not in warnings, that it gave up what the Hopper kernel lives on: products run
# one after the other (C7510 to C7518), or setmaxnreg is ignored (C7508). This fails on any of them.
# Arguments: NVCC, ROOT (of the repository).
execute_process(
  COMMAND ${NVCC} -std=c++20 --expt-relaxed-constexpr -O3 -DLONGSPAN_SM90A -Xptxas=-v
          -gencode=arch=compute_90a,code=sm_90a -I${ROOT} -I${ROOT}/src -cubin -o sm90_notes.cubin
          ${ROOT}/kernels/cuda/attend_sm90.cu
  OUTPUT_VARIABLE notes ERROR_VARIABLE notes RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "nvcc: ${notes}")
endif()
if(NOT notes MATCHES "registers")
  message(FATAL_ERROR "no notes from ptxas: ${notes}")
endif()
string(REGEX MATCHALL "[^\n]*\\(C75[0-9][0-9]\\)[^\n]*" found "${notes}")
if(found)
  message(FATAL_ERROR "${found}")
endif()
