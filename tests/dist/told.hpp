// The errors of ranks that make different calls, or the same calls in different orders.
#pragma once

#include <functional>
#include <string>

#include "longspan/communicator.hpp"
#include "longspan/error.hpp"

namespace longspan::tests {

/// A rank's error; empty without one.
inline std::string told(const std::function<void()>& work) {
  try {
    work();
    return "";
  } catch (const UsageError& error) {
    return error.what();
  } catch (const Error& error) {
    return "not a UsageError: " + std::string(error.what());
  }
}

/// A rank's error where the last rank runs two layers, or two merges, in the other order.
template <class Runner, class Args>
std::string told_in_different_orders(const Communicator& world, Runner& first, Runner& second,
                                     const Args& args) {
  const bool swapped = world.rank() == world.size() - 1;
  return told([&] {
    (swapped ? second : first).run(args);
    (swapped ? first : second).run(args);
    first.wait();
    second.wait();
  });
}

}  // namespace longspan::tests
