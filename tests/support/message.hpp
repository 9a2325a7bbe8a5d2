// Random bytes that every rank can compute, so that received data can be compared.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "longspan/communicator.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::tests {

using Bytes = std::vector<unsigned char>;

/// A fresh seed, the same on every rank.
inline std::uint64_t shared_seed(const Communicator& world) {
  return std::stoull(world.gather(std::to_string(fresh_seed()), "seed").front());
}

/// The message of `from` to `to`.
inline Bytes message(std::uint64_t seed, int from, int to, std::size_t bytes) {
  std::seed_seq mix{seed, std::uint64_t(from), std::uint64_t(to), std::uint64_t(bytes)};
  std::mt19937 random(mix);
  Bytes text(bytes);
  for (auto& byte : text) byte = static_cast<unsigned char>(random());
  return text;
}

inline void append(Bytes& all, const Bytes& part) {
  all.insert(all.end(), part.begin(), part.end());
}

}  // namespace longspan::tests
