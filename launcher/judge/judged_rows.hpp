// The inputs of sampled rows as the oracle takes them, and the share of rows and heads that a rank
// judges.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "launcher/judge/oracle.hpp"
#include "launcher/problem/problem.hpp"

namespace longspan::launcher {

/// One head of one of the rows that are judged, with all keys of its sequence and kv head.
struct JudgedRow {
  std::int64_t number;  // of this rank's rows and heads, from 0
  std::size_t i;        // of the judged rows
  std::int64_t at;      // row of the whole q
  int sequence;
  std::int64_t t;  // row of its sequence
  int head;
  const RowMajor& keys;    // [kv_len, head_dim], in order of position
  const RowMajor& values;  // [kv_len, value_dim]
};

/// How many (row, head) this rank judges of that many rows.
std::int64_t count_judged(const Communicator& world, const Options& options, std::int64_t rows);

/// Calls `visit` for each of them, on several threads. Keys are read once for a kv head.
void for_judged_rows(const Communicator& world, const Problem& problem,
                     const std::vector<std::int64_t>& rows,
                     const std::function<void(const JudgedRow&)>& visit);

/// Row t of sequence b, which is row `at` of the whole q: what it stands for, rotated and rounded
/// where the problem says so.
Eigen::VectorXd query_row(const Problem& problem, std::int64_t at, int b, std::int64_t t, int head);

/// One head of a row of a source.
Eigen::VectorXd head_of(const Source& source, std::int64_t row, int head);

/// The unit of scores for the bounds. A rotated element is rounded to the type of q, and may become
/// its neighbour if it lies between two numbers.
double score_unit(const Options& options);

/// |a - b|, where two NaNs or two equal infinities agree, and only one is an infinite error.
double distance(double a, double b);

/// The numbers of every rank. Collective.
std::vector<std::vector<double>> gather_numbers(const Communicator& world,
                                                const std::vector<double>& mine, const char* step);

}  // namespace longspan::launcher
