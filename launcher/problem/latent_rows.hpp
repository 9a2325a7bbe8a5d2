// Problems whose keys are latent rows that carry their scales.
#pragma once

#include "launcher/problem/problem.hpp"

namespace longspan::launcher {

/// Stores the keys of a problem as rows of `format`, whose values are in them: Problem::stored_k
/// has the rows, and k and v their numbers, in fp32.
void store_in_rows(Problem& problem, DType format);

}  // namespace longspan::launcher
