/* The flce_comm of a call. The stable ABI has no process groups, and the arguments of torch's
 * functional collectives have no stable type: flce/collectives.py implements operators for them.
 * Where the GPUs can read each other's memory, it also allocates symmetric memory, and
 * cuda/peers.cu copies. */
#ifndef FLCE_OP_COMM_H
#define FLCE_OP_COMM_H

#include "binding/torch_device.h"
#include "comm.h"

namespace {

#define COMM_SCHEMA "(Tensor(a!) received, Tensor sent, str group, int id) -> ()"

/* The collectives of one call; table() is NULL without a group. */
class Collectives {
 public:
  Collectives(const Device& device, const flce_problem& problem,
              const std::optional<std::string>& group)
      : device_(device),
        ranks_(problem.ranks),
        rank_(problem.rank),
        group_(group.value_or("")),
        table_{this, send_buffer, all_gather, all_to_all, wait} {}
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  const flce_comm* table() const { return group_.empty() ? nullptr : &table_; }

 private:
  template <typename T>
  static StableIValue value(const T& item) {
    return torch::stable::detail::from(item);
  }

  static flce_status call_operator(const char* op, StableIValue* arguments) {
    if (torch_call_dispatcher(op, "", arguments, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS)
      return FLCE_OK;
    StableIValue text[1]; /* the dispatcher's error message does not include the operator's */
    if (torch_call_dispatcher("flce::comm_error", "", text, TORCH_ABI_VERSION) !=
        AOTI_TORCH_SUCCESS)
      return flce_fail(FLCE_DEVICE_ERROR, "%s failed", op);
    return flce_fail(FLCE_DEVICE_ERROR, "%s",
                     torch::stable::detail::to<std::string>(text[0]).c_str());
  }

  /* The status of a function of the CUDA library, with the library's own error message. */
  flce_status with_cuda_message(flce_status status) const {
    return status == FLCE_OK ? status : flce_fail(status, "%s", device_.table()->last_error());
  }

  Tensor byte_tensor(const void* data, int64_t bytes) const {
    int64_t stride = 1;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
        const_cast<void*>(data), 1, &bytes, &stride, 0,
        torch::stable::detail::to<int32_t>(value(ScalarType::Byte)), device_.id().type,
        device_.id().index, &handle));
    return Tensor(handle);
  }

  flce_status call_collective(const char* op, flce_collective_id id, void* recv, const void* send,
                              int64_t sent_bytes, int64_t bytes) const {
    StableIValue arguments[] = {value(byte_tensor(recv, ranks_ * bytes)),
                                value(byte_tensor(send, sent_bytes)), value(group_),
                                value(static_cast<int64_t>(id))};
    return call_operator(op, arguments);
  }

  static flce_status send_buffer(void* self, flce_collective_id id, int64_t bytes, void** memory) {
    auto* comm = static_cast<Collectives*>(self);
    flce_peers& peers = comm->peers_[id];
    *memory = nullptr;
    peers = {};
    if (comm->device_.id().type == aoti_torch_device_type_cpu()) return FLCE_OK;
    StableIValue arguments[] = {value(comm->group_), value(static_cast<int64_t>(id)), value(bytes)};
    FLCE_TRY(call_operator("flce::comm_send_buffer", arguments));
    auto addresses = torch::stable::detail::to<std::vector<int64_t>>(arguments[0]);
    if (static_cast<int64_t>(addresses.size()) != 2 * comm->ranks_ ||
        comm->ranks_ > FLCE_MOST_PEERS)
      return FLCE_OK;
    peers.ranks = static_cast<int>(comm->ranks_);
    peers.rank = static_cast<int>(comm->rank_);
    for (int64_t r = 0; r < comm->ranks_; r++) {
      peers.data[r] = reinterpret_cast<void*>(addresses[2 * r]);
      peers.flags[r] = reinterpret_cast<void*>(addresses[2 * r + 1]);
    }
    *memory = peers.data[comm->rank_];
    return FLCE_OK;
  }

  /* Whether copy engines serve the collective: what it sends is in the memory of send_buffer. */
  bool uses_copy_engines(flce_collective_id id) const { return peers_[id].ranks > 0; }

  static flce_status all_gather(void* self, flce_collective_id id, void* recv, const void* send,
                                int64_t bytes) {
    const auto* comm = static_cast<const Collectives*>(self);
    if (!comm->uses_copy_engines(id))
      return comm->call_collective("flce::comm_all_gather", id, recv, send, bytes, bytes);
    return comm->with_cuda_message(
        cuda_library().peers_begin(comm->device_.cuda(), &comm->peers_[id], id, recv, 0, bytes));
  }

  static flce_status all_to_all(void* self, flce_collective_id id, void* recv, const void* send,
                                int64_t bytes) {
    const auto* comm = static_cast<const Collectives*>(self);
    if (!comm->uses_copy_engines(id))
      return comm->call_collective("flce::comm_all_to_all", id, recv, send, comm->ranks_ * bytes,
                                   bytes);
    return comm->with_cuda_message(cuda_library().peers_begin(
        comm->device_.cuda(), &comm->peers_[id], id, recv, comm->rank_ * bytes, bytes));
  }

  static flce_status wait(void* self, flce_collective_id id) {
    const auto* comm = static_cast<const Collectives*>(self);
    if (comm->uses_copy_engines(id))
      return comm->with_cuda_message(cuda_library().peers_wait(comm->device_.cuda(), id));
    StableIValue arguments[] = {value(comm->group_), value(static_cast<int64_t>(id))};
    return call_operator("flce::comm_wait", arguments);
  }

  const Device& device_;
  int64_t ranks_, rank_;
  std::string group_;
  flce_peers peers_[FLCE_COLLECTIVES] = {};
  flce_comm table_;
};

}  // namespace

#endif
