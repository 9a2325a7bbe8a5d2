// Lists the problems of `longspan verify`: each family varies one part of the contract.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "launcher/options/options.hpp"
#include "launcher/problem/problem.hpp"

namespace longspan::launcher {

struct Family {
  std::vector<Problem> problems;
  bool same_bits = false;  // the digest must be that of one rank alone
  std::string why_empty;   // why there is no problem, where there is none
};

struct Sweep {
  int ranks = 1;
  VerifyOptions::Size size = VerifyOptions::Size::standard;
  std::uint64_t seed = 0;
  int threads = 0;
  bool gpu = false;

  /// Picks a count or length by the size of the sweep.
  template <class T>
  T pick(T quick, T standard, T full) const {
    return size == VerifyOptions::Size::quick  ? quick
           : size == VerifyOptions::Size::full ? full
                                               : standard;
  }
};

struct FamilyMaker {
  const char* name;
  Family (*make)(const Sweep&);
};

std::span<const FamilyMaker> family_makers();

}  // namespace longspan::launcher
