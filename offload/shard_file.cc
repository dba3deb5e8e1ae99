#include "ebb/offload/shard_file.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/offload/file_transfers.h"
#include "ebb/offload/unnamed_file.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr int64_t kBlockBytesMax = int64_t{1} << 30;
constexpr int kDepthMax = 1 << 14;

bool IsWholeBlocks(int64_t bytes) {
  return bytes % ShardFile::kAlignment == 0;
}

int64_t AlignedUp(int64_t bytes) {
  return (bytes + ShardFile::kAlignment - 1) / ShardFile::kAlignment * ShardFile::kAlignment;
}

absl::Status Check(const ShardFile::Options& options) {
  const AioOptions& aio = options.aio;
  if (options.directories.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard file '", options.name, "' has no directory"));
  }
  if (options.bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard file '", options.name, "' of ", options.bytes, " bytes"));
  }
  if (aio.block_bytes <= 0 || !IsWholeBlocks(aio.block_bytes) || aio.block_bytes > kBlockBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("aio.block_size is ", aio.block_bytes,
                                                   "; it has to be a multiple of ",
                                                   ShardFile::kAlignment, " up to 1 GiB"));
  }
  if (aio.queue_depth < 1 || aio.queue_depth > kDepthMax) {
    return absl::InvalidArgumentError(absl::StrCat("aio.queue_depth is ", aio.queue_depth,
                                                   "; it has to be from 1 to ", kDepthMax));
  }
  return absl::OkStatus();
}

void SayBuffered(const std::string& path) {
  static std::once_flag said;
  std::call_once(said, [&] {
    LogWarning(absl::StrCat("the file system of '", path,
                            "' refuses O_DIRECT: transfers use the page cache, which costs memory "
                            "and CPU time"));
  });
}

// Sets it for all files or for none, because all stripes must move in the same way.
absl::StatusOr<bool> SetDirect(std::vector<UnnamedFile>& files) {
  for (UnnamedFile& file : files) {
    EBB_ASSIGN_OR_RETURN(const bool direct, file.SetDirect());
    if (direct) continue;
    SayBuffered(file.path());
    for (UnnamedFile& other : files) other.SetBuffered();
    return false;
  }
  return true;
}

}  // namespace

struct ShardFile::State {
  State(std::vector<UnnamedFile> made, const Options& as, int64_t bytes)
      : files(std::move(made)), options(as), stripes(StripesOf(as, bytes)) {}

  static Stripes StripesOf(const Options& options, int64_t bytes) {
    return {static_cast<int>(options.directories.size()), bytes, options.aio.block_bytes};
  }
  FileTransfers::Options TransferOptions() const {
    std::vector<int> descriptors;
    for (const UnnamedFile& file : files) descriptors.push_back(file.descriptor());
    return {.files = std::move(descriptors),
            .paths = Paths(),
            .direct = direct,
            .aio = options.aio,
            .backend = options.backend,
            .own_thread = options.own_thread,
            .memory = options.memory,
            .wrap_queue = options.wrap_queue};
  }
  absl::Status MakeTransfers() {
    EBB_ASSIGN_OR_RETURN(transfers, FileTransfers::Create(stripes, TransferOptions()));
    return absl::OkStatus();
  }
  absl::Status Resize(const Stripes& resized) {
    // Also if their total length is right: an earlier call that failed may have resized some of
    // them.
    for (size_t i = 0; i < files.size(); ++i)
      EBB_RETURN_IF_ERROR(
          files[i].Resize(resized.FileBytes(static_cast<int>(i)), options.whole_need));
    stripes = resized;
    return absl::OkStatus();
  }

  std::vector<std::string> Paths() const {
    std::vector<std::string> paths;
    for (const UnnamedFile& file : files) paths.push_back(file.path());
    return paths;
  }

  // In the order in which they outlive each other.
  std::vector<UnnamedFile> files;
  Options options;
  Stripes stripes;
  bool direct = false;
  std::unique_ptr<FileTransfers> transfers;
};

absl::StatusOr<std::unique_ptr<ShardFile>> ShardFile::Create(const Options& options) {
  EBB_RETURN_IF_ERROR(Check(options));
  const auto count = static_cast<int>(options.directories.size());
  const int64_t bytes = AlignedUp(options.bytes);
  const Stripes stripes = State::StripesOf(options, bytes);
  std::vector<UnnamedFile> files;
  files.reserve(options.directories.size());
  const std::string title =
      options.owner.empty() ? options.name : absl::StrCat(options.name, " of ", options.owner);
  for (int i = 0; i < count; ++i) {
    EBB_ASSIGN_OR_RETURN(UnnamedFile file,
                         UnnamedFile::Create(options.directories[i], title, stripes.FileBytes(i),
                                             options.whole_need));
    files.push_back(std::move(file));
  }
  auto state = std::make_unique<State>(std::move(files), options, bytes);
  EBB_ASSIGN_OR_RETURN(state->direct, SetDirect(state->files));
  EBB_RETURN_IF_ERROR(state->MakeTransfers());
  return std::unique_ptr<ShardFile>(new ShardFile(std::move(state)));
}

absl::Status ShardFile::Reopen(std::optional<int64_t> bytes,
                               std::vector<std::span<std::byte>> memory) {
  const auto is_same = [](std::span<std::byte> one, std::span<std::byte> other) {
    return one.data() == other.data() && one.size() == other.size();
  };
  const std::vector<std::span<std::byte>>& before = state_->options.memory;
  const Stripes resized =
      bytes ? State::StripesOf(state_->options, AlignedUp(*bytes)) : state_->stripes;
  if (state_->transfers->error().ok() && resized.bytes() == state_->stripes.bytes() &&
      std::equal(before.begin(), before.end(), memory.begin(), memory.end(), is_same))
    return absl::OkStatus();
  state_->transfers.reset();
  absl::Status reopened = state_->Resize(resized);
  if (reopened.ok()) {
    state_->options.memory = std::move(memory);
    reopened = state_->MakeTransfers();
  }
  if (!reopened.ok())
    state_->transfers = FileTransfers::Failed(state_->stripes, state_->TransferOptions(), reopened);
  return reopened;
}

ShardFile::ShardFile(std::unique_ptr<State> state) : state_(std::move(state)) {}

ShardFile::~ShardFile() = default;

void ShardFile::StartRead(IoTransfer& transfer, int64_t offset, std::byte* data, int64_t bytes) {
  state_->transfers->Start(transfer, false, offset, data, bytes);
}

void ShardFile::StartWrite(IoTransfer& transfer, int64_t offset, const std::byte* data,
                           int64_t bytes) {
  state_->transfers->Start(transfer, true, offset, const_cast<std::byte*>(data), bytes);
}

absl::Status ShardFile::Wait(IoTransfer& transfer) {
  return state_->transfers->Wait(transfer);
}

int64_t ShardFile::bytes_read() const {
  return state_->transfers->bytes_read();
}
int64_t ShardFile::bytes_written() const {
  return state_->transfers->bytes_written();
}
IoBackend ShardFile::backend() const {
  return state_->transfers->backend();
}
std::string ShardFile::description() const {
  return state_->transfers->description();
}

std::string ShardFile::paths() const {
  return absl::StrCat("'", absl::StrJoin(state_->Paths(), "', '"), "'");
}

}  // namespace ebb
