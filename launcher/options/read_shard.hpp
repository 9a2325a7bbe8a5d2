// Reads how keys are shared among ranks, in the form of options: a layout's name, and for
// interleaved ones optionally a colon and the keys of a block.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "longspan/shard.hpp"

namespace longspan::launcher {

/// Returns false where `text` is not one of `allowed`, or has a block of less than 1 or more than
/// 2^31 - 1 keys.
bool read_shard(const std::string& text, std::initializer_list<Layout> allowed, Layout& layout,
                std::int64_t& block);

/// The same for every layout without a table. Throws CLI::ValidationError with the option's name.
void read_rule(const char* option, const std::string& text, Layout& layout, std::int64_t& block);

}  // namespace longspan::launcher
