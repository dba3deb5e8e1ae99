// Faults between a shard file and the system, on every way to the disk.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "backends.h"
#include "ebb/offload/io_error.h"
#include "faulty_queue.h"

namespace ebb::testing {

class IoFaultTest : public OnEveryBackend {
 protected:
  static constexpr int64_t kBytes = int64_t{3} << 20;

  IoFaultTest() { ForgetRefusals(); }

  // Earlier refusals must not affect later queues.
  static void ForgetRefusals() { Refusals::ForgetGivenUp(); }

  // The depth over all its files.
  int64_t depth() const {
    return int64_t{Options(kBytes).aio.queue_depth} * GetParam().directories;
  }
  std::unique_ptr<ShardFile> MakeWith(FaultyQueue::Fault fault, size_t hold = 1) {
    ShardFile::Options options = Options(kBytes);
    options.wrap_queue = WithFaults(std::move(fault), hold, GetParam().own_thread);
    return Make(options);
  }
  // Writes and reads the whole file, with other memory.
  void ExpectRoundTrip(ShardFile& file) {
    const PinnedMemory written = Memory(kBytes), read = Memory(kBytes);
    FillRandomly(written.buffer.span(), 7);
    ASSERT_EQ(Write(file, 0, written.buffer.span()), absl::OkStatus());
    ASSERT_EQ(Read(file, 0, read.buffer.span()), absl::OkStatus());
    EXPECT_EQ(std::memcmp(written.buffer.data(), read.buffer.data(), kBytes), 0);
    EXPECT_EQ(file.bytes_written(), kBytes);
    EXPECT_EQ(file.bytes_read(), kBytes);
  }

  const PinnedMemory memory_ = Memory(kBytes);
};

}  // namespace ebb::testing
