// A rank's request to join, and the reasons to refuse it.
//
// The secret keeps out programs that do not know it: of other users, scanners, jobs at the wrong
// port. It travels in plain text, and what follows is neither encrypted nor signed. So it does not
// help against an attacker that can read or change the traffic.
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

/// This rank's hello; `key`, which ranks have told each other, is part of the secret. Throws
/// UsageError where it is longer than a stranger may send.
Hello hello_of(const Launch& launch, const std::string& key = "");

std::string to_text(const Hello& hello);
/// Throws an internal Error for a text that to_text did not write.
Hello hello_from(const std::string& text);

/// Why `hello` does not belong to the job of `ours`, or nothing. Only a rank that knows the secret
/// learns more than that it is wrong.
std::optional<std::string> objection(const Hello& ours, const Hello& hello);

}  // namespace longspan::comm
