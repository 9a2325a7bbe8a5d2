// Writes the command's output. Standard output may be a full disk, a pipe without a reader, or
// closed: a write can fail, and then the command must not end with success.
#pragma once

#include <cstdio>
#include <string_view>

namespace longspan::launcher {

/// Opens the three standard streams where the caller has closed them, so that no file opened later
/// takes their numbers, and makes failed writes errors instead of signals.
void settle_streams();

/// Writes `text` and flushes; throws InputError where that fails.
void print(std::string_view text, std::FILE* to = stdout);

/// Writes one line on stderr, in one write. Control characters in it become blanks and question
/// marks, and the middle of a very long one is left out. If it cannot be read there, only the exit
/// status remains.
void complain(std::string_view text) noexcept;

}  // namespace longspan::launcher
