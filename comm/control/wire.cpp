#include "comm/control/wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "longspan/error.hpp"

namespace longspan::comm {

namespace {

/// Bytes of the UTF-8 character that `text` begins with; 0 for invalid bytes, and for a character
/// that controls a terminal.
std::size_t shown_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const std::size_t bytes = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < bytes) return 0;
  std::uint32_t code = byte(0) & (0x7fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr std::uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  const bool is_character =
      code >= kLeast[bytes - 2] && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000);
  return is_character && code >= 0xa0 ? bytes : 0;
}

}  // namespace

std::string printable(std::string_view text, std::size_t most) {
  std::string shown;
  const std::size_t whole = text.size();
  while (!text.empty() && shown.size() < most) {
    const std::size_t bytes = shown_bytes(text);
    const char c = text.front();
    if (bytes > 0)
      shown += text.substr(0, bytes);
    else if (c == '\n' || c == '\t')
      shown += c == '\n' ? "\\n" : "\\t";
    else
      shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  if (!text.empty()) shown += fmt::format("... (cut, of {} bytes)", whole);
  return shown;
}

void throw_damage() {
  throw Error(ErrorKind::internal,
              "A control message came damaged: is every rank of the same longspan version?");
}

std::vector<std::string> unpack(std::string_view packed) {
  std::vector<std::string> texts;
  while (!packed.empty()) {
    std::size_t length = 0;
    const char* end = packed.data() + packed.size();
    const auto [colon, error] = std::from_chars(packed.data(), end, length);
    if (error != std::errc() || colon == end || *colon != ':' ||
        length > static_cast<std::size_t>(end - colon - 1))
      throw_damage();
    texts.emplace_back(colon + 1, length);
    packed.remove_prefix(static_cast<std::size_t>(colon + 1 - packed.data()) + length);
  }
  return texts;
}

std::vector<std::string> unpack(std::string_view packed, std::size_t count) {
  auto texts = unpack(packed);
  if (texts.size() != count) throw_damage();
  return texts;
}

}  // namespace longspan::comm
