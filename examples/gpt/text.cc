#include "text.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb::gpt {
namespace {

constexpr char kDefaultFolder[] = "/usr/share/common-licenses";

absl::Status Append(const std::string& path, std::vector<uint8_t>& bytes) {
  std::error_code error;
  const auto kind = std::filesystem::status(path, error).type();
  if (kind == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrCat("--data ", path, ": no such file"));
  }
  if (kind == std::filesystem::file_type::directory) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data ", path, ": is a directory; name the files in it"));
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) {
    return absl::PermissionDeniedError(
        absl::StrCat("--data ", path, ": cannot be opened: ", std::strerror(errno)));
  }
  const size_t before = bytes.size();
  std::array<uint8_t, 1 << 16> piece;
  while (const size_t got = std::fread(piece.data(), 1, piece.size(), file.get())) {
    bytes.insert(bytes.end(), piece.begin(), piece.begin() + static_cast<int64_t>(got));
  }
  if (std::ferror(file.get())) {
    return absl::DataLossError(
        absl::StrCat("--data ", path, ": cannot be read: ", std::strerror(errno)));
  }
  if (bytes.size() == before)
    return absl::InvalidArgumentError(absl::StrCat("--data ", path, ": is empty"));
  return absl::OkStatus();
}

// SplitMix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number
// generators"): bits of a counter.
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
  // `increment`: the operator of a loop over the range throws where the folder cannot be read on.
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

absl::StatusOr<Text> Text::Load(std::span<const std::string> paths, int64_t context) {
  std::vector<uint8_t> bytes;
  for (const std::string& path : paths) EBB_RETURN_IF_ERROR(Append(path, bytes));
  auto text = FromBytes(std::move(bytes), context);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data ", paths.front(),
                     paths.size() > 1 ? absl::StrCat(" and ", paths.size() - 1, " more") : "", ": ",
                     text.status().message()));
  }
  return text;
}

absl::StatusOr<Text> Text::FromBytes(std::vector<uint8_t> bytes, int64_t context) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  const int64_t held_out = std::max(size / 20, context + 1);
  if (size - held_out < context + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(size, " bytes of text are too few for --context ", context,
                     ": training and held-out text need ", context + 1, " each"));
  }
  Text text;
  text.bytes_ = std::move(bytes);
  text.fingerprint_ =
      sharding::Hasher()
          .Add({reinterpret_cast<const char*>(text.bytes_.data()), text.bytes_.size()})
          .hash();
  text.held_out_begin_ = size - held_out;
  return text;
}

void Text::Training(uint64_t seed, uint64_t index, std::span<int32_t> tokens,
                    std::span<int32_t> targets) const {
  const uint64_t places = static_cast<uint64_t>(held_out_begin_) - tokens.size();
  Copy(static_cast<int64_t>(Scramble(Scramble(seed) ^ index) % places), tokens, targets);
}

void Text::HeldOut(int64_t index, int64_t count, std::span<int32_t> tokens,
                   std::span<int32_t> targets) const {
  const int64_t places = held_out_bytes() - static_cast<int64_t>(tokens.size());
  Copy(held_out_begin_ + index * places / count, tokens, targets);
}

void Text::Copy(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const {
  std::copy_n(bytes_.begin() + begin, tokens.size(), tokens.begin());
  std::copy_n(bytes_.begin() + begin + 1, targets.size(), targets.begin());
}

}  // namespace ebb::gpt
