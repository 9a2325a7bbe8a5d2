# The host kernels are compiled once for each instruction set (kernels/host/targets.hpp), and half of
# that time is AVX-512's. With LONGSPAN_HOST_TARGETS=native a machine without AVX-512 skips it, and
# one with it builds all. The macros of GCC and Clang show what the machine has.
if(LONGSPAN_HOST_TARGETS STREQUAL "native" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null
                  OUTPUT_VARIABLE machine ERROR_QUIET)
  set(lacks "")
  if(machine AND NOT machine MATCHES "__AVX512BW__")
    set(lacks AVX3)
  elseif(machine AND NOT machine MATCHES "__AVX512VBMI2__")
    set(lacks AVX3_DL)
  endif()
  if(lacks)
    message(STATUS "longspan: host kernels without ${lacks}, which this machine lacks")
    set_property(SOURCE ${host_kernels} ${CMAKE_CURRENT_SOURCE_DIR}/src/communicator/info.cpp
                 APPEND PROPERTY COMPILE_DEFINITIONS LONGSPAN_HOST_LACKS_${lacks})
  endif()
elseif(NOT LONGSPAN_HOST_TARGETS MATCHES "^(all|native)$")
  message(FATAL_ERROR "LONGSPAN_HOST_TARGETS is ${LONGSPAN_HOST_TARGETS}, and can be all or native")
endif()
