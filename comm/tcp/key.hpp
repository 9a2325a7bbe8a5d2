// The secret of ranks that belong together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace longspan::comm {

inline constexpr std::size_t kKeyBytes = 32;

/// 128 random bits, in hexadecimal digits.
inline std::string fresh_key() {
  std::random_device random;
  std::string key;
  while (key.size() < kKeyBytes) {
    const std::uint32_t bits = random();
    for (int i = 0; i < 8; ++i) key += "0123456789abcdef"[bits >> (4 * i) & 15];
  }
  return key;
}

/// Takes the same time however much of it is right.
inline bool same_secret(const std::string& ours, const std::string& theirs) {
  unsigned differs = ours.size() != theirs.size();
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    const char own = ours.empty() ? '\0' : ours[i % ours.size()];
    differs |= static_cast<unsigned char>(own) ^ static_cast<unsigned char>(theirs[i]);
  }
  return differs == 0;
}

}  // namespace longspan::comm
