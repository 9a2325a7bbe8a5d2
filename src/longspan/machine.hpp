/// \file
/// What a machine can do, in a few constants from which the time of a run is predicted.
/// `longspan calibrate` measures them and saves them; "auto" chooses a strategy by them.
#pragma once

#include <string>

#include "longspan/types.hpp"

namespace longspan {

class Communicator;

/// The constants of one rank among others that work as hard.
struct Machine {
  Device device = Device::host;  ///< where ranks compute
  std::string name;              ///< of the constants: "built in", or the file that they come from
  std::string measured;          ///< when, and how evenly, where the file says so
  double flops_per_s = 0;        ///< of attention with many query rows
  double key_bytes_per_s = 0;    ///< of keys and values, read for few query rows
  double merge_bytes_per_s = 0;  ///< of states that are folded
  double copy_bytes_per_s = 0;   ///< of rows that are packed, or put in order
  double call_s = 0;             ///< one more call of attention
  double latency_s = 0;          ///< one transfer between ranks of a node, however small
  double peer_latency_s =
      0;  ///< the same on GPUs that write each other's buffers, which need no NCCL
  double link_bytes_per_s = 0;       ///< received from ranks of the same node
  double node_latency_s = 0;         ///< one transfer between nodes, however small
  double node_link_bytes_per_s = 0;  ///< received from other nodes
  double overlap = 0;  ///< 0 to 1: how much of a transfer costs the computation beside it nothing
};

/// Constants for one rank of a device where nothing was measured: of an H200 with NVLink and 400
/// Gbit/s between nodes, or of one core whose ranks share memory.
Machine built_in_machine(Device device);

/// The constants that hold on this machine: those of the file that LONGSPAN_MACHINE names, or else
/// of machine_file(device) where it is there, or else the built-in ones. Throws UsageError as
/// machine_in does, also for a file that LONGSPAN_MACHINE names and is not there.
Machine machine_here(Device device);

/// The constants of a file. Throws UsageError for one that cannot be read, that is no ordinary file
/// (a folder, a FIFO, a device), or that has more than 64 KiB; and as machine_from does.
Machine machine_in(const std::string& path, Device device);

/// The same constants on every rank: those that hold on rank 0's machine. It is collective, and
/// what machine_here throws there is thrown on all.
Machine shared_machine(const Communicator& world);

/// Where `longspan calibrate` saves: the file that LONGSPAN_MACHINE names, or else
/// longspan/host.machine or longspan/cuda.machine in the user's folder of settings. Empty where
/// neither is known.
std::string machine_file(Device device);

/// Where the constants come from, for people: the name, and what is known of the measurement.
std::string origin_of(const Machine& machine);

/// One line for each constant, its name and its value, as machine_from reads it, behind a remark of
/// when they were measured where that is known.
std::string to_text(const Machine& machine);

/// Reads what to_text wrote; other lines that begin with # are left out. Throws UsageError, which
/// names `origin`, for an unknown name, a constant that is missing, and a value out of bounds:
/// rates are 1 to 1e30 in a second, times 1e-15 to 1e6 seconds, overlap 0 to 1.
Machine machine_from(const std::string& text, const std::string& origin, Device device);

}  // namespace longspan
