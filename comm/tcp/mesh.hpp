// Messages between every two ranks, each pair on its own connection, which a communicator and those
// split from it share. Only wait() blocks.
//
// A message is a header and its bytes. It goes from the sender's memory to the memory that was
// posted for it. Messages of one group from one rank to another match in the order of posting. A
// message that comes before its receive, while something else is read from its rank, is kept. Where
// no receive is posted nothing is read, and TCP holds the sender back.
//
// All traffic is of ranks with one key, and is trusted as far as it can be read.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/control/patience.hpp"
#include "comm/tcp/frames.hpp"

namespace longspan::comm {

class Mesh {
 public:
  struct Header {
    std::uint32_t magic = 0;
    std::uint32_t group = 0;
    std::uint32_t collective =
        0;  // what both ranks must mean by it: Collective::kind, and whether `digest` counts
    std::uint32_t zero = 0;
    std::uint64_t bytes = 0;
    std::uint64_t digest = 0;
  };

  /// One message, to or from one rank. It must not move from post to its end, or to cancel.
  struct Part {
    Part* next = nullptr;  // the mesh's own
    int peer = 0;          // of all ranks
    bool receives = false;
    bool is_done = false;
    bool is_wrong = false;  // another message came: `header` is its header
    Header header;          // what is sent; what must come, and then what came
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    std::size_t* left = nullptr;  // counts the parts of its transfer that are not done
  };

  /// By rank, sockets that do not block; none to this one.
  explicit Mesh(std::vector<Fd> connections);

  /// From here on messages of this group may be posted; early ones have been kept for it.
  void open(std::uint32_t group);
  /// Nothing is read or written any more for unfinished parts of this group, and what comes later
  /// for it is dropped. A partly sent message goes on as zeros: others share its connection.
  void cancel(std::uint32_t group) noexcept;

  /// `part` with its header's group, collective, digest and bytes.
  void post(Part& part);

  /// Moves what can move now, of all groups. True: something did.
  bool progress();
  /// Returns when something may move, or after `limit`.
  void wait(milliseconds limit) noexcept;

  /// Why this part can no longer be done, since the connection has ended; null: it can.
  const char* trouble(const Part& part) const;

 private:
  struct Queue {
    Part* first = nullptr;
    Part* last = nullptr;
    void push(Part& part);
    Part* pop();
  };
  /// A message without a receive so far.
  struct Early {
    Header header;
    std::unique_ptr<std::byte[]> bytes;
    bool is_whole = false;
  };
  struct Group {
    std::vector<Queue> asked;             // by rank
    std::vector<std::list<Early>> early;  // by rank
    bool is_open = false;
  };
  struct Channel {
    Fd fd;
    int peer = 0;
    const char* read_end = nullptr;   // why no more comes
    const char* write_end = nullptr;  // why no more goes

    Queue sends;
    Part* sending = nullptr;  // null and out_left > 0: zeros
    Header out_header;
    std::size_t out_header_left = 0;
    const std::byte* out = nullptr;
    std::size_t out_left = 0;

    std::size_t asked = 0;  // receives that are not done
    std::vector<std::byte> buffer;
    std::size_t begin = 0, end = 0;  // what was read ahead
    Part* receiving = nullptr;
    Early* early = nullptr;  // both null and in_left > 0: dropped
    std::byte* in = nullptr;
    std::size_t in_left = 0;
    bool in_message = false;

    bool wants_to_write() const {
      return !write_end && (out_header_left > 0 || out_left > 0 || sends.first);
    }
    bool wants_to_read() const { return !read_end && asked > 0; }
  };

  Group& group_of(std::uint32_t number);
  bool write(Channel& channel);
  bool read(Channel& channel);
  bool take(Channel& channel);
  void begin_message(Channel& channel, const Header& header) noexcept;
  void begin_send(Channel& channel);
  void end_message(Channel& channel);
  void finish(Part& part);
  bool accept(Channel& channel, Part& part, const Header& header);

  std::vector<Channel> channels_;  // by rank
  std::map<std::uint32_t, Group> groups_;
  std::uint32_t next_group_ = 0;  // groups below it that are not in groups_ have ended
  std::vector<pollfd> polled_;
  std::vector<std::byte> scrap_;  // where unwanted bytes are read to
};

}  // namespace longspan::comm
