#include "data/text.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/offload/memory_limits.h"
#include "report/digest.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr char kDefaultFolder[] = "/usr/share/common-licenses";

constexpr int64_t kFingerprinted = int64_t{64} << 20, kPiece = int64_t{1} << 16;

// How much memory a pipe's text may take.
int64_t PipeMax() {
  int64_t most = Text::kPipeMax;
  for (const MemoryLimit& limit : ReadMemoryLimits()) most = std::min(most, limit.ram / 4);
  return std::max(most, kPiece);
}

// SplitMix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number
// generators"): it turns a counter into random bits.
uint64_t Scramble(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> DefaultTextFiles() {
  std::set<std::filesystem::path> files;
  std::error_code error;
  // `increment`, because the operator of a loop over the range throws if the folder cannot be read
  // further.
  for (std::filesystem::directory_iterator entry(kDefaultFolder, error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code unreadable;
    const auto path = std::filesystem::canonical(entry->path(), unreadable);
    if (unreadable || !std::filesystem::is_regular_file(path, unreadable) ||
        access(path.c_str(), R_OK) != 0) {
      continue;
    }
    files.insert(path);
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat("no readable file in ", kDefaultFolder,
                                            " to train on; name some with --data"));
  }
  return std::vector<std::string>(files.begin(), files.end());
}

int64_t Text::held_bytes() const {
  int64_t held = 0;
  for (const Part& part : parts_) held += std::ssize(part.bytes);
  return held;
}

absl::Status Text::Append(const std::string& path) {
  GPT_ASSIGN_OR_RETURN(const std::shared_ptr<const TextFile> file, TextFile::Open(path));
  const int64_t size = file->size();
  // A pipe has no size, and cannot be opened again.
  if (size > 0 && (size > kFileHeldMax || held_bytes() + size > kFilesHeldMax)) {
    parts_.push_back({.begin = size_, .size = size, .file = files_->Add(*file), .bytes = {}});
    size_ += size;
    return absl::OkStatus();
  }
  if (parts_.empty() || parts_.back().file)
    parts_.push_back({.begin = size_, .size = 0, .file = {}, .bytes = {}});
  Part& part = parts_.back();
  GPT_RETURN_IF_ERROR(file->ReadToEnd(std::max(size, PipeMax()), part.bytes));
  if (std::ssize(part.bytes) == part.size)
    return absl::InvalidArgumentError(absl::StrCat("--data ", path, ": is empty"));
  size_ += std::ssize(part.bytes) - part.size;
  part.size = std::ssize(part.bytes);
  return absl::OkStatus();
}

absl::Status Text::Finish(int64_t context) {
  const int64_t held_out = std::max(size_ / 20, context + 1);
  if (size_ - held_out < context + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(size_, " bytes of text are too few for --context ", context,
                     ": training and held-out text need ", context + 1, " each"));
  }
  held_out_begin_ = size_ - held_out;
  Hasher hasher;
  hasher.Add(size_);
  std::vector<uint8_t> piece(static_cast<size_t>(std::min(kPiece, size_)));
  const int64_t step = std::max(kPiece, size_ / (kFingerprinted / kPiece));
  for (int64_t begin = 0; begin < size_; begin += step) {
    const auto bytes = std::span(piece).first(static_cast<size_t>(std::min(kPiece, size_ - begin)));
    GPT_RETURN_IF_ERROR(Read(begin, bytes));
    hasher.Add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  fingerprint_ = hasher.hash();
  return absl::OkStatus();
}

absl::StatusOr<Text> Text::Load(std::span<const std::string> paths, int64_t context) {
  Text text;
  for (const std::string& path : paths) GPT_RETURN_IF_ERROR(text.Append(path));
  const absl::Status finished = text.Finish(context);
  if (absl::IsInvalidArgument(finished)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data ", paths.front(),
                     paths.size() > 1 ? absl::StrCat(" and ", paths.size() - 1, " more") : "", ": ",
                     finished.message()));
  }
  GPT_RETURN_IF_ERROR(finished);
  return text;
}

absl::StatusOr<Text> Text::FromBytes(std::vector<uint8_t> bytes, int64_t context) {
  Text text;
  text.size_ = std::ssize(bytes);
  text.parts_.push_back({.begin = 0, .size = text.size_, .file = {}, .bytes = std::move(bytes)});
  GPT_RETURN_IF_ERROR(text.Finish(context));
  return text;
}

absl::Status Text::Training(uint64_t seed, uint64_t index, std::span<int32_t> tokens,
                            std::span<int32_t> targets) const {
  const uint64_t places = static_cast<uint64_t>(held_out_begin_) - tokens.size();
  return Copy(static_cast<int64_t>(Scramble(Scramble(seed) ^ index) % places), tokens, targets);
}

absl::Status Text::HeldOut(int64_t index, int64_t count, std::span<int32_t> tokens,
                           std::span<int32_t> targets) const {
  const int64_t places = held_out_bytes() - static_cast<int64_t>(tokens.size());
  return Copy(held_out_begin_ + index * places / count, tokens, targets);
}

absl::Status Text::Read(int64_t begin, std::span<uint8_t> bytes) const {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                               [](int64_t at, const Part& p) { return at < p.begin + p.size; });
  while (!bytes.empty()) {
    const int64_t from = begin - part->begin;
    const int64_t count = std::min(part->size - from, std::ssize(bytes));
    const auto now = bytes.first(static_cast<size_t>(count));
    if (part->file) {
      GPT_RETURN_IF_ERROR(files_->ReadAt(*part->file, from, now));
    } else {
      std::copy_n(part->bytes.begin() + from, count, now.begin());
    }
    bytes = bytes.subspan(now.size());
    begin += count;
    ++part;
  }
  return absl::OkStatus();
}

absl::Status Text::Copy(int64_t begin, std::span<int32_t> tokens,
                        std::span<int32_t> targets) const {
  // The bytes are read into the memory of the targets, which has room for them. Then each is
  // widened, from the last one down, so that no byte is overwritten before it is read.
  const size_t length = tokens.size();
  const std::span bytes(reinterpret_cast<uint8_t*>(targets.data()), length + 1);
  if (absl::Status read = Read(begin, bytes); !read.ok()) {
    for (const std::span<int32_t> numbers : {tokens, targets})
      std::fill(numbers.begin(), numbers.end(), 0);  // an embedding has row 0
    return read;
  }
  std::copy_n(bytes.begin(), length, tokens.begin());
  for (size_t i = length; i-- > 0;) {
    const int32_t target = bytes[i + 1];
    targets[i] = target;
  }
  return absl::OkStatus();
}

}  // namespace ebb::gpt
