// The only macros for calls into foreign libraries that report errors by value. They turn errors
// into typed errors that name the call and the place. Foreign types appear only where a macro is
// used.
#pragma once

#include <string>

#include "longspan/error.hpp"

namespace longspan {

[[noreturn]] inline void throw_backend(const char* library, const char* call,
                                       const std::string& found, const char* file, int line) {
  throw BackendError(std::string(library) + ": " + call + " returned " + found + " at " + file +
                     ":" + std::to_string(line));
}

}  // namespace longspan

/// Makes a CUDA runtime call; it needs <cuda_runtime_api.h>. The runtime keeps a thread's last
/// error besides the returned status. The macro clears it, so that a caller that catches the error
/// and continues leaves nothing behind for the next check.
#define LONGSPAN_CUDA(call) LONGSPAN_CUDA_STATUS(call, #call)

/// The same with the status that a call named `name` has returned.
#define LONGSPAN_CUDA_STATUS(status, name)                                                   \
  do {                                                                                       \
    const cudaError_t longspan_status = (status);                                            \
    if (longspan_status != cudaSuccess) {                                                    \
      static_cast<void>(cudaGetLastError());                                                 \
      ::longspan::throw_backend("CUDA", name, cudaGetErrorString(longspan_status), __FILE__, \
                                __LINE__);                                                   \
    }                                                                                        \
  } while (0)

/// Whether a CUDA runtime call worked, for code that continues after a failure, such as
/// destructors. It clears the last error too.
#define LONGSPAN_CUDA_WORKED(call) \
  ((call) == cudaSuccess || (static_cast<void>(cudaGetLastError()), false))

/// Makes an MPI call on a communicator whose error handler is MPI_ERRORS_RETURN; it needs <mpi.h>.
#define LONGSPAN_MPI(call)                                                        \
  do {                                                                            \
    const int longspan_status = (call);                                           \
    if (longspan_status != MPI_SUCCESS) {                                         \
      char longspan_text[MPI_MAX_ERROR_STRING] = "";                              \
      int longspan_length = 0;                                                    \
      MPI_Error_string(longspan_status, longspan_text, &longspan_length);         \
      ::longspan::throw_backend("MPI", #call, longspan_text, __FILE__, __LINE__); \
    }                                                                             \
  } while (0)
