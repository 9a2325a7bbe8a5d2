// Packs several texts into one: each is written as its length, a colon, and its bytes ("5:hello"),
// so that any bytes may travel. The control plane sends nothing else.
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

/// Throws an internal Error, for bytes that pack did not write.
[[noreturn]] void throw_damage();

/// Takes texts apart; throws that error for such bytes.
std::vector<std::string> unpack(std::string_view packed);
/// Does the same, and throws for another number of texts too.
std::vector<std::string> unpack(std::string_view packed, std::size_t count);

}  // namespace longspan::comm
