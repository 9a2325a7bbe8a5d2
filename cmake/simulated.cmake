# A build in which the CUDA kernels run on CPUs (docs/contributing/testing.md): the C++ compiler compiles
# .cu files against a second implementation of kernels/cuda/arch/, and CUDA's runtime and NCCL have
# stand-ins. Of CUDA only headers are needed.
find_program(LONGSPAN_NVCC NAMES nvcc HINTS ENV CUDACXX ENV CUDA_PATH PATH_SUFFIXES bin
             PATHS /usr/local/cuda)
if(LONGSPAN_NVCC)
  file(REAL_PATH ${LONGSPAN_NVCC} nvcc)
  cmake_path(GET nvcc PARENT_PATH toolkit)
  cmake_path(GET toolkit PARENT_PATH toolkit)
endif()
find_path(LONGSPAN_CUDA_HEADERS cuda_fp8.h
          HINTS ${CUDAToolkit_ROOT}/include ${toolkit}/include ENV CUDA_PATH
          PATHS /usr/local/cuda/include)
find_path(LONGSPAN_NCCL_HEADERS nccl.h HINTS ${NCCL_ROOT}/include ${LONGSPAN_CUDA_HEADERS})
if(NOT LONGSPAN_CUDA_HEADERS OR NOT LONGSPAN_NCCL_HEADERS)
  message(FATAL_ERROR "LONGSPAN_SIMULATED=ON needs headers of the CUDA toolkit (cuda_fp8.h) and of "
    "NCCL (nccl.h), and found '${LONGSPAN_CUDA_HEADERS}' and '${LONGSPAN_NCCL_HEADERS}'. The "
    "packages cuda-cudart-dev, cuda-crt and libnccl-dev of NVIDIA have them, as do the wheels "
    "nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-nccl; -DCUDAToolkit_ROOT and -DNCCL_ROOT "
    "name the folders.")
endif()
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  message(FATAL_ERROR "LONGSPAN_SIMULATED=ON: the simulator's fibers are written for x86-64 only "
                      "(kernels/simulated/fiber.cpp), and this is ${CMAKE_SYSTEM_PROCESSOR}.")
endif()

set(LONGSPAN_SIMULATED_ARCH 90 CACHE STRING "The GPU that the simulator stands for: 80, 89 or 90")
set(LONGSPAN_SIMULATED_SANITIZE "" CACHE STRING "Of kernels alone: thread, for races, or nothing")
set(LONGSPAN_HAVE_CUDA ON)

add_library(longspan_simulated INTERFACE)
target_include_directories(longspan_simulated SYSTEM INTERFACE
  ${LONGSPAN_CUDA_HEADERS} ${LONGSPAN_NCCL_HEADERS})
target_compile_definitions(longspan_simulated INTERFACE
  LONGSPAN_SIMULATED LONGSPAN_SIMULATED_ARCH=${LONGSPAN_SIMULATED_ARCH})
if(LONGSPAN_SIMULATED_SANITIZE STREQUAL "thread")
  target_link_options(longspan_simulated INTERFACE -fsanitize=thread)
endif()

# longspan_simulate(target files...): files with kernels, with settings here that nvcc has by
# default. nvcc checks their warnings; and -O1 compiles in a third of the time of the fastest code.
function(longspan_simulate target)
  target_include_directories(${target} BEFORE PRIVATE
    ${PROJECT_SOURCE_DIR}/kernels/simulated/include ${PROJECT_SOURCE_DIR})
  set(options -x c++ -include ${PROJECT_SOURCE_DIR}/kernels/simulated/builtins.hpp -w -O1 -g1
              -march=native -ffp-contract=off -Wno-psabi)
  if(LONGSPAN_SIMULATED_SANITIZE)
    list(APPEND options -fsanitize=${LONGSPAN_SIMULATED_SANITIZE})
  endif()
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${options}")
endfunction()
