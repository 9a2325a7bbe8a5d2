// Where rank 0 listens and the others go: the addresses that a name stands for.
//
// Rank 0 listens on the addresses of the name alone, as far as they are this machine's. It listens
// on all of the machine's where the name says nothing about which one the others see: when none of
// them is this machine's (a port that is forwarded, a container), or when a machine's name stands
// for its own loopback, as Debian writes it into /etc/hosts.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/tcp/frames.hpp"

namespace longspan::comm {

struct Address {
  int family = 0;
  socklen_t length = 0;
  sockaddr_storage storage{};

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool loopback() const;
};

/// What an address in digits stands for, without asking anybody; nothing for any other name.
std::vector<Address> numeric(const std::string& host, int port);

/// A look-up of a name. A name server may take minutes to answer, or never do: a thread of its own
/// asks it, and is left to itself where nobody waits any more.
class Lookup {
 public:
  /// Throws BackendError where no thread can be started.
  Lookup(const std::string& host, int port);
  bool done() const;
  /// Once it is done: what the name stands for, or nothing, with the resolver's words in `why`.
  std::vector<Address> take(std::string& why);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

/// Sockets that listen. `wait` sleeps a little, and says whether there is more time for the name
/// server. Throws UsageError for a name that stands for nothing and for a port that is taken.
std::vector<Fd> listen_at(const std::string& host, int port, const std::function<bool()>& wait);

/// What tells apart the places between which a loopback does not reach: the machine, and the
/// network namespace on it (containers have their own).
std::string network_place();

/// A socket that listens at a port that was free, and the numeric addresses at which others may
/// find it, those that are likelier to do first.
struct Door {
  Fd listener;
  int port = 0;
  std::vector<std::string> hosts = {};
};
/// `within`: the others are all in this network place, and nobody else is to knock. Throws
/// BackendError.
Door open_door(bool within);

/// The same for who is in this network place: a Unix socket in the namespace that places have, at
/// the name `hosts` says. It is faster than the loopback, whose segments of 64 KB are as long as
/// TCP's first peer buffer: then a sender waits for an acknowledgement that is delayed by 40 ms.
Door open_local_door(const std::string& name);
Address local_address(const std::string& name);

}  // namespace longspan::comm
