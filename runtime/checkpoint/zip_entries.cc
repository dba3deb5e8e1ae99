#include "ebb/runtime/checkpoint/zip_entries.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr int64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kCentralBytes = 46,
                  kLocalBytes = 30, kCommentMax = 65535;
constexpr uint32_t kEndMark = 0x06054b50, kLocatorMark = 0x07064b50, kEnd64Mark = 0x06064b50,
                   kCentralMark = 0x02014b50, kLocalMark = 0x04034b50;
constexpr uint16_t kZip64Field = 1, kEncrypted = 1;
constexpr uint32_t kIn64Bits = 0xffffffff;  // a size or an offset that stands in the zip64 field
// The limit of the central directory: a million tensors.
constexpr int64_t kDirectoryBytesMax = int64_t{64} << 20;

template <class Number>
Number At(std::string_view bytes, size_t at) {
  static_assert(std::endian::native == std::endian::little);
  Number number = 0;
  std::memcpy(&number, bytes.data() + at, sizeof(number));
  return number;
}

class Archive {
 public:
  Archive(int descriptor, std::string_view path, int64_t bytes)
      : descriptor_(descriptor), path_(path), bytes_(bytes) {}

  absl::StatusOr<std::map<std::string, ZipEntry>> Entries() {
    EBB_RETURN_IF_ERROR(FindDirectory());
    EBB_ASSIGN_OR_RETURN(const std::string directory, Read(directory_, directory_bytes_));
    std::string_view rest = directory;
    while (!rest.empty()) {
      if (std::cmp_less(rest.size(), kCentralBytes) || At<uint32_t>(rest, 0) != kCentralMark)
        return Bad("its directory has a part that is not an entry");
      const size_t name = At<uint16_t>(rest, 28), extra = At<uint16_t>(rest, 30),
                   comment = At<uint16_t>(rest, 32);
      const size_t all = static_cast<size_t>(kCentralBytes) + name + extra + comment;
      if (rest.size() < all) return Bad("its directory ends within an entry");
      EBB_RETURN_IF_ERROR(Add(rest.substr(0, all), name, extra));
      rest.remove_prefix(all);
    }
    if (std::cmp_not_equal(ranges_.size(), count_))
      return Bad(absl::StrCat("its directory has ", ranges_.size(), " entries, but says ", count_));
    std::sort(ranges_.begin(), ranges_.end());
    for (size_t i = 1; i < ranges_.size(); ++i)
      if (ranges_[i].first < ranges_[i - 1].second) return Bad("two of its entries overlap");
    return std::move(entries_);
  }

 private:
  absl::Status Bad(std::string_view what) const {
    return absl::DataLossError(absl::StrCat(
        "'", std::string(path_), "' is not a complete zip archive: ", std::string(what)));
  }
  absl::StatusOr<std::string> Read(int64_t at, int64_t count) const {
    std::string bytes(static_cast<size_t>(count), '\0');
    EBB_RETURN_IF_ERROR(ReadAt(descriptor_, path_, at, std::as_writable_bytes(std::span(bytes))));
    return bytes;
  }

  // Reads the records at the file's end.
  absl::Status FindDirectory() {
    if (bytes_ < kEndBytes) return Bad(absl::StrCat("it has ", bytes_, " bytes"));
    // Most archives have no comment after the record.
    EBB_ASSIGN_OR_RETURN(std::string tail, Read(bytes_ - kEndBytes, kEndBytes));
    int64_t tail_begin = bytes_ - kEndBytes;
    if (At<uint32_t>(tail, 0) != kEndMark) {
      tail_begin = std::max<int64_t>(0, tail_begin - kCommentMax);
      EBB_ASSIGN_OR_RETURN(tail, Read(tail_begin, bytes_ - tail_begin));
    }
    int64_t end = bytes_ - kEndBytes;  // of the file, where its end record begins
    const auto is_end = [&](int64_t at) {
      const size_t in_tail = static_cast<size_t>(at - tail_begin);
      return At<uint32_t>(tail, in_tail) == kEndMark &&
             at + kEndBytes + At<uint16_t>(tail, in_tail + 20) == bytes_;
    };
    while (end >= tail_begin && !is_end(end)) --end;
    if (end < tail_begin) return Bad("it lacks the end record: it was cut, or is another format");
    const std::string_view record =
        std::string_view(tail).substr(static_cast<size_t>(end - tail_begin));
    uint64_t count = At<uint16_t>(record, 10), bytes = At<uint32_t>(record, 12),
             begin = At<uint32_t>(record, 16);
    int64_t after = end;  // the end of the space for the directory
    std::string locator;
    if (end >= kLocatorBytes) {
      EBB_ASSIGN_OR_RETURN(locator, Read(end - kLocatorBytes, kLocatorBytes));
    }
    if (!locator.empty() && At<uint32_t>(locator, 0) == kLocatorMark) {
      const uint64_t at = At<uint64_t>(locator, 8);
      if (std::cmp_greater(at, end - kLocatorBytes) ||
          end - kLocatorBytes - static_cast<int64_t>(at) < kEnd64Bytes)
        return Bad("its zip64 record is outside of it");
      after = static_cast<int64_t>(at);
      EBB_ASSIGN_OR_RETURN(const std::string record64, Read(after, kEnd64Bytes));
      if (At<uint32_t>(record64, 0) != kEnd64Mark) return Bad("its zip64 record is damaged");
      count = At<uint64_t>(record64, 32);
      bytes = At<uint64_t>(record64, 40);
      begin = At<uint64_t>(record64, 48);
    }
    if (std::cmp_greater(begin, after) ||
        std::cmp_greater(bytes, after - static_cast<int64_t>(begin)))
      return Bad("its directory is outside of it");
    if (std::cmp_greater(bytes, kDirectoryBytesMax))
      return Bad(absl::StrCat("its directory has ", bytes, " bytes; at most ", kDirectoryBytesMax,
                              " are read"));
    directory_ = static_cast<int64_t>(begin);
    directory_bytes_ = static_cast<int64_t>(bytes);
    count_ = count;
    return absl::OkStatus();
  }

  // Adds one entry of the directory. The local header says where its data begins.
  absl::Status Add(std::string_view entry, size_t name_bytes, size_t extra_bytes) {
    const std::string name(entry.substr(kCentralBytes, name_bytes));
    const std::string shown = config::Quoted(name);
    const auto bad = [&](std::string_view what) {
      return Bad(absl::StrCat("entry ", shown, " ", std::string(what)));
    };
    uint64_t bytes = At<uint32_t>(entry, 24), packed = At<uint32_t>(entry, 20),
             local = At<uint32_t>(entry, 42);
    // The zip64 field has those of these three numbers that need 64 bits, in this order.
    std::string_view extra =
        entry.substr(static_cast<size_t>(kCentralBytes) + name_bytes, extra_bytes);
    while (extra.size() >= 4) {
      const uint16_t kind = At<uint16_t>(extra, 0);
      const size_t size = At<uint16_t>(extra, 2);
      if (size > extra.size() - 4) return bad("has an extra field that is cut");
      std::string_view field = extra.substr(4, size);
      extra.remove_prefix(4 + size);
      if (kind != kZip64Field) continue;
      for (uint64_t* const number : {&bytes, &packed, &local}) {
        if (*number != kIn64Bits) continue;
        if (field.size() < 8) return bad("lacks a number of its zip64 field");
        *number = At<uint64_t>(field, 0);
        field.remove_prefix(8);
      }
    }
    const uint16_t flags = At<uint16_t>(entry, 8), method = At<uint16_t>(entry, 10);
    if ((flags & kEncrypted) != 0 || method != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("entry ", shown, " of '", std::string(path_), "' is ",
                       method != 0 ? absl::StrCat("compressed (method ", method, ")") : "encrypted",
                       ", which is not read: torch.save stores entries as they are"));
    }
    if (bytes != packed) return bad("has two different sizes");
    if (std::cmp_greater(local, directory_) ||
        directory_ - static_cast<int64_t>(local) < kLocalBytes)
      return bad("begins outside of the file");
    const int64_t header = static_cast<int64_t>(local);
    EBB_ASSIGN_OR_RETURN(const std::string there, Read(header, kLocalBytes));
    if (At<uint32_t>(there, 0) != kLocalMark || At<uint16_t>(there, 26) != name_bytes)
      return bad("has no header where its data should be");
    const int64_t begin = header + kLocalBytes + At<uint16_t>(there, 26) + At<uint16_t>(there, 28);
    if (begin > directory_ || std::cmp_greater(bytes, directory_ - begin))
      return bad(absl::StrCat("has ", bytes, " bytes, more than the file"));
    EBB_ASSIGN_OR_RETURN(const std::string local_name,
                         Read(header + kLocalBytes, static_cast<int64_t>(name_bytes)));
    if (local_name != name) return bad("has another name in its own header");
    const ZipEntry placed = {.begin = begin, .bytes = static_cast<int64_t>(bytes)};
    if (!entries_.emplace(name, placed).second) return bad("is there twice");
    ranges_.emplace_back(header, begin + placed.bytes);
    return absl::OkStatus();
  }

  const int descriptor_;
  const std::string_view path_;
  const int64_t bytes_;
  int64_t directory_ = 0, directory_bytes_ = 0;
  uint64_t count_ = 0;
  std::map<std::string, ZipEntry> entries_;
  std::vector<std::pair<int64_t, int64_t>> ranges_;  // of headers with their data
};

}  // namespace

absl::StatusOr<std::map<std::string, ZipEntry>> ReadZipEntries(int descriptor,
                                                               std::string_view path) {
  EBB_ASSIGN_OR_RETURN(const int64_t bytes, BytesOfRegularFile(descriptor, path));
  return Archive(descriptor, path, bytes).Entries();
}

}  // namespace ebb
