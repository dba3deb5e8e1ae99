// Which communicators of a world ranks have left, and after how many calls: a rank that leaves one tells all others,
// because NCCL does not, and a rank that has called more than that waits in vain.
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
  std::string rank;    // for people: "rank 1"
  uint64_t calls = 0;  // of all ranks together, that it has made
};

// One rank's knowledge. Communicators have names that no two share; what is said of one that is still to come, or that
// this rank has left, is kept until all of its ranks have left it. Any thread.
class Departures {
 public:
  // This rank leaves a communicator of `size` ranks; what all others have to be told.
  std::string Leave(const std::string& name, int size, const Departure& mine);
  // What another rank was to tell. A text that cannot be read is passed over.
  void Hear(std::string_view text);
  // The first that has left.
  std::optional<Departure> First(const std::string& name);
  // Of how many communicators something is kept.
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
