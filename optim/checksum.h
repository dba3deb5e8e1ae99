// A checksum of a file's contents, against faults of disks and other programs, not against an
// attacker.
//
// 64 bits over blocks of 64 KiB. Each block has a sum of its own, so that threads share the work,
// and a pass over memory sums a block while it is in the cache:
//
//   block     8 lanes of 64 bits, a word each of every 64-byte stripe: lane = rotate(lane + word).
//             The lanes are scrambled (XXH3's way) after every 64 stripes. Between scrambles the
//             words of a lane have different rotations. A part of a stripe is filled with zeros.
//   checksum  length and sums of the blocks, in order
//
// It costs two cheap operations for each vector, and, with vectors of 512 bits, one register for
// each array. A loop that waits for memory has room for them. Each step is invertible, so a change
// within one word always changes the sum. Changes of two words of a lane in the same 4 KiB can
// cancel, if one is the other rotated by 29 bits for each stripe between them. All other changes,
// such as swapped words, stripes or blocks and added or lost zeros, are missed with a chance of
// about 2^-64. The sum is the same on every SIMD target and for every number of threads.
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
// The checksum on a team; `blocks` is scratch of ChecksumBlocks(bytes.size()).
uint64_t Checksum(ThreadTeam& team, std::span<const std::byte> bytes, std::span<uint64_t> blocks);

// Parts of a checksum: the sum of one block, which is whole unless it is the last, and the checksum
// from all sums.
uint64_t ChecksumOfBlock(std::span<const std::byte> block);
uint64_t ChecksumFromBlocks(std::span<const uint64_t> blocks, int64_t bytes);

// The checksum of bytes that come in pieces. Pieces of whole blocks are summed in place.
class RunningChecksum {
 public:
  void Append(std::span<const std::byte> bytes);
  // The checksum of all bytes since the last call.
  uint64_t Take();

 private:
  std::vector<uint64_t> blocks_;
  std::vector<std::byte> rest_;  // the started block
  int64_t bytes_ = 0;
};

}  // namespace ebb::optim
