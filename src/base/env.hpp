// The only reader of environment variables. `longspan env` prints the same table.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace longspan {

struct Env {
  std::chrono::milliseconds deadline{60'000};  // LONGSPAN_DEADLINE_S, seconds; fractions count
  int threads = 0;                             // LONGSPAN_THREADS; 0: the cores of this process
  int port = 0;                                // LONGSPAN_PORT; 0: MASTER_PORT + 1
  std::string secret;                          // LONGSPAN_SECRET; never printed

  /// Throws UsageError for a value that does not parse.
  static Env read();
};

/// The variable's value, or nothing if it is unset or empty. For variables of launchers (RANK,
/// OMPI_COMM_WORLD_SIZE ...).
std::optional<std::string> env_text(const char* name);

/// Whether the variable is set, even to an empty value: an empty CUDA_VISIBLE_DEVICES hides every
/// GPU.
bool env_is_set(const char* name);

/// Sets the variable for libraries that read it later, unless the user has.
void env_default(const char* name, const char* value);

}  // namespace longspan
