// Starts threads, which may fail: a limit on processes or memory is an error of the machine. The
// caller gets an error that names it instead of std::terminate.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::comm {

/// Starts a thread that runs `work`; `purpose` ends the sentence "no thread could be started for
/// ...".
template <class Work>
std::thread start_thread(const char* purpose, Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw BackendError(std::string("No thread could be started for ") + purpose + " (" +
                       error.what() +
                       "): raise the limits on processes and on memory (ulimit -u, ulimit -v).");
  }
}

}  // namespace longspan::comm
