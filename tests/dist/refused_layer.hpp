// A layer that cannot be made, by every rank of a test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longspan/longspan.hpp"

namespace longspan::tests {

/// Expects that a layer with these options is Unsupported, with `word` in the reason, and that the
/// message names gather-states as one that could.
inline void expect_refused_layer(const Communicator& world, const Options& options,
                                 const char* word) {
  try {
    Attention(world, options);
    FAIL() << "made a layer, in spite of " << word;
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(word));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("could: gather-states"));
  }
}

}  // namespace longspan::tests
