#include "ebb/runtime/device/cpu/copy.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ebb {
namespace {

// Waking a worker costs as much as copying a few hundred KiB.
constexpr int64_t kGrainBytes = int64_t{512} << 10;
// One core must find in its cache what another core has just read.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

#if defined(__x86_64__)
void CopyPastCaches(std::byte* destination, const std::byte* source, int64_t bytes) {
  constexpr int64_t kLine = 64;
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(destination) % kLine);
  const int64_t head = std::min(bytes, (kLine - misaligned) % kLine);
  std::memcpy(destination, source, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i);
    auto* to = reinterpret_cast<__m128i*>(destination + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(destination + i, source + i, static_cast<size_t>(bytes - i));
  // Streaming stores are not ordered by the release stores that later publish the data.
  _mm_sfence();
}
#else
void CopyPastCaches(std::byte* destination, const std::byte* source, int64_t bytes) {
  std::memcpy(destination, source, static_cast<size_t>(bytes));
}
#endif

void CopyOnThread(std::byte* destination, const std::byte* source, int64_t bytes,
                  bool past_caches) {
  if (past_caches) {
    CopyPastCaches(destination, source, bytes);
  } else {
    std::memcpy(destination, source, static_cast<size_t>(bytes));
  }
}

}  // namespace

void CopyBytes(ThreadTeam& team, void* destination, const void* source, int64_t bytes,
               int64_t together_bytes) {
  if (destination == source || bytes == 0) return;
  const bool past_caches = std::max(bytes, together_bytes) >= kStreamingCopyBytes;
  team.Run(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    CopyOnThread(static_cast<std::byte*>(destination) + begin,
                 static_cast<const std::byte*>(source) + begin, end - begin, past_caches);
  });
}

void CopyBytesInStep(ThreadTeam& team, std::span<const CopyEnds> copies, int64_t bytes,
                     int64_t together_bytes) {
  const int64_t all = bytes * static_cast<int64_t>(copies.size());
  const bool past_caches = std::max(all, together_bytes) >= kStreamingCopyBytes;
  team.Run(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece += kPieceBytes) {
      const int64_t piece_bytes = std::min(kPieceBytes, end - piece);
      for (const CopyEnds& copy : copies) {
        if (copy.destination == copy.source) continue;
        CopyOnThread(static_cast<std::byte*>(copy.destination) + piece,
                     static_cast<const std::byte*>(copy.source) + piece, piece_bytes, past_caches);
      }
    }
  });
}

void ZeroBytes(ThreadTeam& team, void* destination, int64_t bytes) {
  team.Run(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<std::byte*>(destination) + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace ebb
