// A checksum of what lies in a file, against disks and other programs, not against an adversary.
//
// 64 bits over blocks of 64 KiB, each of which has a sum of its own, so that threads share the work
// and a pass over memory takes the sum of a block while that is in the cache:
//
//   block     8 lanes of 64 bits, a word each of every 64-byte stripe: lane = rotate(lane + word).
//             The lanes are scrambled (XXH3's way) after every 64 stripes: until then no two words
//             of a lane are rotated alike. A rest of a stripe is filled with zeros.
//   checksum  length and sums of the blocks, in order
//
// Two cheap operations a vector, one register an array where vectors have 512 bits: a loop that
// waits for memory has room for them. Each step can be undone, so whatever changes within one word
// shows, always. Two words of a lane in the same 4 KiB can cancel if one's difference is the other's,
// rotated by 29 bits for each stripe between them; words, stripes and blocks that change places,
// zeros that are added or left out and all else show with all but one chance in 2^64 or so. The
// same on every SIMD target and for every number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

inline constexpr int64_t kChecksumBlock = 64 * 1024;  // bytes
constexpr int64_t ChecksumBlocks(int64_t bytes) {
  return (bytes + kChecksumBlock - 1) / kChecksumBlock;
}

uint64_t Checksum(std::span<const std::byte> bytes);
// The same; `blocks` is scratch of ChecksumBlocks(bytes.size()).
uint64_t Checksum(ThreadTeam& team, std::span<const std::byte> bytes, std::span<uint64_t> blocks);

// Its parts: the sum of one block, whole but for the last, and the checksum from all sums.
uint64_t ChecksumOfBlock(std::span<const std::byte> block);
uint64_t ChecksumFromBlocks(std::span<const uint64_t> blocks, int64_t bytes);

// The checksum of bytes that come in pieces. Pieces of whole blocks are summed where they lie.
class RunningChecksum {
 public:
  void Append(std::span<const std::byte> bytes);
  // Of all that came since the last call.
  uint64_t Take();

 private:
  std::vector<uint64_t> blocks_;
  std::vector<std::byte> rest_;  // of a block
  int64_t bytes_ = 0;
};

}  // namespace ebb::optim
