// Packs several texts into one: each as its length, a colon, and its bytes ("5:hello"), so that any
// bytes may travel. The control plane sends nothing else.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace longspan::comm {

inline void pack_into(std::string& packed, std::string_view text) {
  packed += std::to_string(text.size());
  packed += ':';
  packed += text;
}

template <class... Text>
std::string pack(const Text&... texts) {
  std::string packed;
  (pack_into(packed, texts), ...);
  return packed;
}

inline std::string pack_all(const std::vector<std::string>& texts) {
  std::string packed;
  for (const std::string& text : texts) pack_into(packed, text);
  return packed;
}

/// Another's text, safe for a message: control characters, and bytes that are not UTF-8, are
/// escaped ("\x1b"). A text longer than `most` bytes is cut, with a note of it.
std::string printable(std::string_view text, std::size_t most = 500);

/// Throws an internal Error for bytes that pack did not write.
[[noreturn]] void throw_damage();

/// Takes texts apart; throws that error for such bytes.
std::vector<std::string> unpack(std::string_view packed);
/// Does the same, and throws for another number of texts too.
std::vector<std::string> unpack(std::string_view packed, std::size_t count);

}  // namespace longspan::comm
