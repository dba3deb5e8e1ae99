// Which communicators of a world ranks have left, and after how many calls. A rank that leaves one
// notifies all others, because NCCL does not, and a rank that makes more calls than that waits in
// vain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace ebb {

struct Departure {
  std::string rank;    // for messages: "rank 1"
  uint64_t calls = 0;  // collective calls of all ranks that it has made
};

// One rank's knowledge. No two communicators share a name. A departure from a communicator that
// does not exist yet, or that this rank has left, is kept until all of its ranks have left it. Any
// thread.
class Departures {
 public:
  // This rank leaves a communicator of `size` ranks. Returns the departure notice for all others.
  std::string Leave(const std::string& name, int size, const Departure& mine);
  // Another rank's departure notice. A text that cannot be read is ignored.
  void Hear(std::string_view text);
  // The first rank that has left.
  std::optional<Departure> First(const std::string& name);
  // How many communicators have departures here.
  size_t known();

 private:
  struct Left {
    Departure first;
    int ranks = 0;
  };
  void Note(const std::string& name, int size, Departure departure);

  std::mutex mutex_;
  std::map<std::string, Left> left_;  // by communicator
};

}  // namespace ebb
