// Writes what the command says. Standard output may be a full disk, a pipe that nobody reads any
// more, or closed: writing there can fail, and then the command must not end with success.
#pragma once

#include <cstdio>
#include <string_view>

namespace longspan::launcher {

/// Gives the three standard streams a place each where the caller has closed them, so that no file
/// that is opened later takes the number, and makes failed writes errors instead of signals.
void settle_streams();

/// Writes `text` and flushes; throws InputError where that fails.
void print(std::string_view text, std::FILE* to = stdout);

/// Writes one line on stderr, in one write; control characters in it become blanks and question
/// marks, and the middle of a very long one is left out. If it cannot be read there, the exit
/// status is all there is.
void complain(std::string_view text) noexcept;

}  // namespace longspan::launcher
