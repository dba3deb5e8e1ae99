#include "clique.h"

#include <algorithm>
#include <cstring>

namespace ebb::stand_in {
namespace {

bool IsExchange(const Part& part) {
  return part.kind == PartKind::kSend || part.kind == PartKind::kReceive;
}

}  // namespace

void Clique::Abort() {
  const std::scoped_lock lock(mutex_);
  broken_ = true;
  changed_.notify_all();
}

bool Clique::Barrier(Lock& lock, const std::atomic<bool>& aborted) {
  const uint64_t barrier = barriers_;
  if (++here_ == size_ && !broken_) {
    here_ = 0;
    ++barriers_;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return barriers_ != barrier || aborted; });
  return !aborted;
}

bool Clique::AllTheSame() const {
  return std::all_of(published_.begin(), published_.end(), [this](const Part* part) {
    const Part& first = *published_[0];
    return part->kind == first.kind && part->count == first.count && part->type == first.type &&
           part->combine == first.combine && part->scale == first.scale && part->peer == first.peer;
  });
}

// Computes into `scratch`, because the destination may be memory that others still read. Returns
// its bytes.
size_t Clique::Compute(int rank, const Part& part, std::vector<std::byte>& scratch) const {
  const size_t block = part.count * BytesOf(part.type);
  const bool gathers = part.kind == PartKind::kAllGather;
  const size_t bytes = gathers ? block * static_cast<size_t>(size_) : block;
  if (scratch.size() < bytes) scratch.resize(bytes);
  if (part.kind == PartKind::kBroadcast) {
    std::memcpy(scratch.data(), published_[static_cast<size_t>(part.peer)]->send, bytes);
  } else if (gathers) {
    for (size_t peer = 0; peer < published_.size(); ++peer)
      std::memcpy(scratch.data() + peer * block, published_[peer]->send, block);
  } else {
    const size_t offset =
        part.kind == PartKind::kReduceScatter ? static_cast<size_t>(rank) * block : 0;
    static thread_local std::vector<const std::byte*> inputs;
    inputs.clear();
    for (const Part* other : published_) inputs.push_back(other->send + offset);
    Reduce(part.type, part.combine, part.scale, inputs, part.count, scratch.data());
  }
  return bytes;
}

bool Clique::RunCollective(int rank, const Part& part, const std::atomic<bool>& aborted,
                           std::vector<std::byte>& scratch) {
  Lock lock(mutex_);
  published_[static_cast<size_t>(rank)] = &part;
  if (!Barrier(lock, aborted)) return false;
  if (broken_ || !AllTheSame()) {  // NCCL would hang
    changed_.wait(lock, [&] { return aborted.load(); });
    return false;
  }
  ++readers_;
  lock.unlock();
  const size_t bytes = Compute(rank, part, scratch);
  lock.lock();
  --readers_;
  changed_.notify_all();
  if (!Barrier(lock, aborted)) return false;
  std::memcpy(part.receive, scratch.data(), bytes);
  return true;
}

void Clique::Run(int rank, const std::vector<Part>& parts, const std::atomic<bool>& aborted,
                 std::vector<std::byte>& scratch) {
  static thread_local std::vector<Post> sends;
  sends.clear();
  sends.reserve(parts.size());  // their addresses are published
  {
    const std::scoped_lock lock(mutex_);
    for (const Part& part : parts) {
      if (part.kind != PartKind::kSend || broken_) continue;
      sends.push_back({.part = &part});
      posts_[{rank, part.peer}].push_back(&sends.back());
    }
    changed_.notify_all();
  }
  for (const Part& part : parts) {
    if (!IsExchange(part) && !RunCollective(rank, part, aborted, scratch)) break;
  }
  Lock lock(mutex_);
  for (const Part& part : parts) {
    if (part.kind != PartKind::kReceive || aborted) continue;
    std::vector<Post*>& posted = posts_[{part.peer, rank}];
    changed_.wait(lock, [&] { return aborted || (!broken_ && !posted.empty()); });
    if (aborted) break;
    const Part& from = *posted.front()->part;
    if (from.count != part.count || from.type != part.type) {
      changed_.wait(lock, [&] { return aborted.load(); });
      break;
    }
    std::memcpy(part.receive, from.send, part.count * BytesOf(part.type));
    posted.front()->taken = true;
    posted.erase(posted.begin());
    changed_.notify_all();
  }
  changed_.wait(lock, [&] {
    return aborted ||
           std::all_of(sends.begin(), sends.end(), [](const Post& post) { return post.taken; });
  });
  // This rank's memory is its own again once no other rank reads it.
  changed_.wait(lock, [&] { return !aborted || readers_ == 0; });
}

}  // namespace ebb::stand_in
