// What a rank says to be let in, and why it may not be.
//
// The secret keeps out who does not know it: other users of the machines, scanners, jobs that took
// the wrong port. It travels as it is and what follows is neither encrypted nor signed, so it does
// not help against who can read or change the traffic.
#pragma once

#include <optional>
#include <string>

#include "comm/control/environment.hpp"

namespace longspan::comm {

struct Hello {
  std::string version;
  std::string run;  // which run of which launcher
  std::string secret;
  int rank = 0;
  int size = 0;
};

/// What this rank says; `key`, which ranks have told each other, is part of the secret. Throws
/// UsageError where it is longer than a stranger may speak.
Hello hello_of(const Launch& launch, const std::string& key = "");

std::string to_text(const Hello& hello);
/// Throws an internal Error for a text that to_text did not write.
Hello hello_from(const std::string& text);

/// Why `hello` does not belong to the job of `ours`, or nothing. Only who knows the secret learns
/// more than that it is wrong.
std::optional<std::string> objection(const Hello& ours, const Hello& hello);

}  // namespace longspan::comm
