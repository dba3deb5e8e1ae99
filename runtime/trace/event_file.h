// One JSON array on disk to which several ranks, threads or processes, add their events in turn.
//
//   [          An open EventFile holds the file's lock. Events go behind the closing bracket first;
//   {...},     Commit then turns that bracket into a comma, with one write of three bytes. So a
//   {...}      failure on the way (a full disk) is undone by cutting the file back, and nothing
//   ]          that other ranks wrote is ever rewritten.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

class EventFile {
 public:
  // Leaves an empty array in place of the file's contents. Refuses symbolic links and files that
  // are not regular, as WaitOpen does.
  static absl::Status Create(const std::string& path);

  // Opens a file that Create made, and waits for its lock.
  static absl::StatusOr<EventFile> WaitOpen(const std::string& path);
  EventFile(EventFile&& other) noexcept;
  EventFile& operator=(EventFile&&) = delete;
  ~EventFile();  // without Commit: the file is as it was

  absl::Status Add(std::string_view event);  // one JSON value
  absl::Status Commit();                     // once, after the last Add

 private:
  EventFile(int fd, const std::string& path) : fd_(fd), path_(path) {}
  static absl::StatusOr<EventFile> WaitOpen(const std::string& path, int flags);
  absl::Status Flush();
  bool Write(std::string_view bytes, int64_t offset);

  int fd_ = -1;
  std::string path_;
  int64_t size_ = 0;    // of the valid array
  int64_t behind_ = 0;  // bytes written after the array, not part of it yet
  std::string buffer_;  // bytes to write after those
};

}  // namespace ebb
