// A simulated GPU as torch's device type "simulated" (PrivateUse1): see README.md.
//
// Operators run on the CPU, on the thread of their stream, over views of device memory: nothing is copied, so work
// that runs too early, too late or on freed memory reads and writes what a GPU would.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <unordered_map>

#include "memory.hpp"

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int POOL = 8; // streams of a device beside the default one; new streams share them in turn
enum CudaError { OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };

struct Device {
    explicit Device(GpuFile *file)
        : gpu(file),
          memory(
              file, [this](int64_t stream, std::shared_ptr<Event> event) { mark(stream, event); },
              [this](int64_t stream, char *start, size_t bytes) {
                  queue(stream).enqueue([=] { std::memset(start, FREED, bytes); });
              },
              [this] { drain(); })
    {
    }

    // Begin to use the device: the context takes its memory until the process ends.
    void initialize()
    {
        std::call_once(once, [this] {
            TORCH_CHECK_WITH(OutOfMemoryError, !gpu_take(gpu, getpid(), gpu_word(&gpu->context_bytes)),
                             "simulated GPU out of memory: no room for a context");
            initialized = true;
            std::thread([this] { watch(); }).detach();
        });
    }

    // Take the memory away and bring it back as the driver orders checkpoints of this process; work waits.
    [[noreturn]] void watch()
    {
        const auto row = [this] { return gpu_owner(gpu, getpid(), 0); };
        const auto away = [&] {
            const int64_t state = row() ? gpu_word(&row()->state) : int64_t(OWNER_RUNNING);
            return state == OWNER_CHECKPOINTED || state == OWNER_FAILED;
        };
        const auto say = [&](int64_t where) { __atomic_store_n(&row()->memory, where, __ATOMIC_RELEASE); };
        for (say(MEMORY_PRESENT);; gpu_sleep(2000000)) {
            if (!away())
                continue;
            std::unique_lock<std::shared_mutex> held(working);
            memory.leave();
            for (say(MEMORY_AWAY); away();)
                gpu_sleep(1000000);
            memory.come_back();
            say(MEMORY_PRESENT);
        }
    }

    Queue &queue(int64_t stream)
    {
        std::lock_guard<std::mutex> guard(mutex);
        auto &queue = queues.at(size_t(stream));
        if (!queue)
            queue = std::make_unique<Queue>(gpu, working, [this](const std::string &text) { fail(text); });
        return *queue;
    }

    void mark(int64_t stream, std::shared_ptr<Event> event)
    {
        const uint64_t place = event->put();
        queue(stream).enqueue([event, place] { event->reach(place); });
    }

    void drain()
    {
        for (int64_t stream = 0; stream <= POOL; stream++)
            if (queues[size_t(stream)])
                queues[size_t(stream)]->drain();
    }

    void fail(const std::string &text)
    {
        std::lock_guard<std::mutex> guard(mutex);
        if (error.empty())
            error = text;
    }

    GpuFile *gpu;
    std::once_flag once;
    std::atomic<bool> initialized{false};
    std::mutex mutex;
    std::array<std::unique_ptr<Queue>, POOL + 1> queues;
    std::atomic<int> next{0};
    std::string error; // of work that ran; it stays, as an error of a kernel does
    std::mutex to_host, to_device;
    std::shared_mutex working; // held by all while work runs, and by one while the memory is away
    at::Generator random = at::detail::createCPUGenerator();
    Memory memory;
};

// While it lives, operators of the CPU draw from a device's random numbers.
struct Draws {
    explicit Draws(Device &device) : random(device.random), host(at::detail::getDefaultCPUGenerator())
    {
        host.set_state(random.get_state());
    }
    ~Draws()
    {
        random.set_state(host.get_state());
        host.set_state(before);
    }
    at::Generator random, host;
    at::Tensor before = host.get_state();
};

// Never destroyed: threads of streams may run until the process is gone.
std::vector<Device *> &devices()
{
    static auto *all = [] {
        auto *found = new std::vector<Device *>;
        const char *text = std::getenv("SIMULATED_GPUS");
        std::istringstream paths(text ? text : "");
        for (std::string path; std::getline(paths, path, ':');)
            if (GpuFile *file = gpu_open(path.c_str())) {
                found->push_back(new Device(file));
                found->back()->memory.index = int(found->size()) - 1;
            }
        return found;
    }();
    return *all;
}

bool forked = false;
thread_local c10::DeviceIndex current = 0;
thread_local std::vector<int64_t> current_streams;
thread_local int last_error = 0; // of this thread's calls: the next operator raises it, as in CUDA

Device &device(c10::DeviceIndex index)
{
    TORCH_CHECK(!forked, "Cannot re-initialize the simulated GPU in a forked process");
    auto &all = devices();
    TORCH_CHECK(index >= 0 && size_t(index) < all.size(), "no simulated GPU ", int(index));
    all[size_t(index)]->initialize();
    return *all[size_t(index)];
}

int64_t &stream_of(c10::DeviceIndex index)
{
    if (current_streams.size() <= size_t(index))
        current_streams.resize(size_t(index) + 1, 0);
    return current_streams[size_t(index)];
}

// Raise what earlier calls and earlier work left behind.
void check(Device &one)
{
    TORCH_CHECK(!gpu_word(&one.gpu->lost), "simulated GPU error: the GPU is lost");
    {
        std::lock_guard<std::mutex> guard(one.mutex);
        TORCH_CHECK(one.error.empty(), "simulated GPU error in earlier work: ", one.error);
    }
    const int code = std::exchange(last_error, 0);
    TORCH_CHECK(!code, "simulated GPU error ", code, " of an earlier call");
}

void synchronize(Device &one)
{
    one.drain();
    check(one);
}

// --- streams and events ------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device getDevice() const override { return {TYPE, current}; }
    c10::Device exchangeDevice(c10::Device to) const override
    {
        const c10::Device from = getDevice();
        setDevice(to);
        return from;
    }
    void setDevice(c10::Device to) const override
    {
        if (to.has_index())
            current = to.index();
    }
    void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.has_index() ? to.index() : current; }
    c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(devices().size()); }

    c10::Stream getStream(c10::Device of) const override { return stream(of, stream_of(of.index())); }
    c10::Stream getDefaultStream(c10::Device of) const override { return stream(of, 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
    c10::Stream getNewStream(c10::Device of, int) const override
    {
        const c10::Device place = of.has_index() ? of : getDevice();
        return stream(place, 1 + device(place.index()).next++ % POOL);
    }
    c10::Stream exchangeStream(c10::Stream to) const override
    {
        return stream(to.device(), std::exchange(stream_of(to.device_index()), to.id()));
    }
    void *getStreamNativeHandle(const c10::Stream of) const override { return reinterpret_cast<void *>(of.id()); }
    bool queryStream(const c10::Stream &of) const override { return queue(of).empty(); }
    void synchronizeStream(const c10::Stream &of) const override
    {
        queue(of).drain();
        check(device(of.device_index()));
    }
    void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize(device(index)); }

    void record(void **event, const c10::Stream &of, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        if (!*event)
            *event = new std::shared_ptr<Event>(std::make_shared<Event>());
        device(of.device_index()).mark(of.id(), shared(*event));
    }
    void block(void *event, const c10::Stream &of) const override
    {
        if (event)
            queue(of).enqueue([it = shared(event), place = shared(event)->last()] { it->wait_for_place(place); });
    }
    bool queryEvent(void *event) const override { return !event || shared(event)->complete(); }
    void synchronizeEvent(void *event) const override
    {
        if (!event)
            return;
        shared(event)->wait();
        for (Device *one : devices())
            if (one->initialized)
                check(*one);
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override
    {
        return std::chrono::duration<double, std::milli>(shared(second)->when() - shared(first)->when()).count();
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        delete static_cast<std::shared_ptr<Event> *>(event);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &on) const override
    {
        device(on.device_index()).memory.record(static_cast<char *>(data.get()), on.id());
    }

  private:
    static c10::Stream stream(c10::Device of, int64_t id)
    {
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, of.has_index() ? of.index() : current), id);
    }
    static Queue &queue(const c10::Stream &of) { return device(of.device_index()).queue(of.id()); }
    static std::shared_ptr<Event> &shared(void *event) { return *static_cast<std::shared_ptr<Event> *>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory ------------------------------------------------------------------------------------------------------

void free_memory(void *address)
{
    if (!forked)
        for (Device *one : devices())
            if (one->memory.holds(address))
                one->memory.free(static_cast<char *>(address));
}

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const c10::Device place(TYPE, current);
        Device &one = device(current);
        if (!bytes)
            return {nullptr, nullptr, &free_memory, place};
        check(one);
        char *address = one.memory.allocate(bytes, stream_of(current));
        TORCH_CHECK_WITH(OutOfMemoryError, address, "simulated GPU out of memory: tried to allocate ", bytes,
                         " bytes of ", gpu_word(&one.gpu->capacity));
        return {address, address, &free_memory, place};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
    void copy_data(void *to, const void *from, size_t bytes) const override
    {
        Device &one = device(current);
        one.queue(stream_of(current)).enqueue([=] { std::memcpy(to, from, bytes); });
    }
    bool initialized() override { return used(); }
    void emptyCache(c10::MempoolId_t) override
    {
        for (Device *one : devices())
            if (one->initialized) {
                one->memory.release();
                check(*one);
            }
    }
    void recordStream(const c10::DataPtr &data, c10::Stream stream) override
    {
        Guard().recordDataPtrOnStream(data, stream);
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override
    {
        c10::CachingDeviceAllocator::DeviceStats stats;
        if (!forked && size_t(index) < devices().size() && !devices()[size_t(index)]->initialized)
            return stats; // as CUDA's: the figures of a device that is not in use open no context
        const Figures figures = device(index).memory.figures();
        stats.allocated_bytes[0].current = figures.allocated;
        stats.allocated_bytes[0].peak = figures.allocated_peak;
        stats.reserved_bytes[0].current = figures.reserved;
        stats.reserved_bytes[0].peak = figures.reserved_peak;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex index) override { device(index).memory.reset_peaks(); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override
    {
        GpuFile *gpu = device(index).gpu;
        gpu_lock(gpu);
        const int64_t used = gpu_used(gpu);
        gpu_unlock(gpu);
        return {size_t(gpu->capacity - used), size_t(gpu->capacity)};
    }

    static bool used()
    {
        const auto &all = devices();
        return !forked && std::any_of(all.begin(), all.end(), [](Device *one) { return one->initialized.load(); });
    }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(TYPE, &device_memory)

// Host memory that copies may read and write while the host goes on.
std::mutex pinned_mutex;
std::map<const char *, size_t> pinned;

bool is_pinned(const void *address)
{
    std::lock_guard<std::mutex> guard(pinned_mutex);
    auto after = pinned.upper_bound(static_cast<const char *>(address));
    return after != pinned.begin() && static_cast<const char *>(address) < std::prev(after)->first + std::prev(after)->second;
}

void free_pinned(void *address)
{
    {
        std::lock_guard<std::mutex> guard(pinned_mutex);
        pinned.erase(static_cast<const char *>(address));
    }
    std::free(address);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void *address = nullptr;
        TORCH_CHECK(!posix_memalign(&address, 64, std::max(bytes, size_t(64))), "no host memory");
        std::lock_guard<std::mutex> guard(pinned_mutex);
        pinned[static_cast<const char *>(address)] = bytes;
        return {address, address, &free_pinned, c10::DeviceType::CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return !devices().empty(); }
    bool hasPrimaryContext(c10::DeviceIndex index) const override
    {
        return index >= 0 && size_t(index) < devices().size() && devices()[size_t(index)]->initialized;
    }
    c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(devices().size()); }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(c10::DeviceIndex to) const override { current = to; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override { return std::exchange(current, to); }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return std::exchange(current, to); }
    bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
    at::Device getDeviceFromPtr(void *address) const override
    {
        for (size_t index = 0; index < devices().size(); index++)
            if (devices()[index]->memory.holds(address))
                return {TYPE, c10::DeviceIndex(index)};
        TORCH_CHECK(false, "not an address of a simulated GPU");
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        c10::StorageImpl *impl = storage.unsafeGetStorageImpl();
        const c10::DeviceGuard guard(storage.device());
        c10::DataPtr memory = device_memory.allocate(bytes);
        if (const size_t kept = std::min(bytes, impl->nbytes()))
            device_memory.copy_data(memory.get(), impl->data(), kept);
        impl->set_data_ptr_noswap(std::move(memory));
        impl->set_nbytes(bytes);
    }
};

// --- operators ---------------------------------------------------------------------------------------------------

// Return a tensor as a CPU tensor over the same memory; a new one, since a stream that let go of a tensor of Python
// would wait for Python's lock. It keeps no memory alive, as little as a copy of CUDA.
at::Tensor view_of(const at::Tensor &tensor)
{
    if (!tensor.defined() || !(tensor.is_privateuseone() || tensor.is_cpu()))
        return tensor;
    const c10::Storage &storage = tensor.storage();
    char *start = static_cast<char *>(storage.mutable_data());
    TORCH_CHECK(start || !tensor.numel(), "simulated GPU error ", int(ILLEGAL_ADDRESS),
                ": an operator used a tensor without memory");
    if (start)
        start += tensor.storage_offset() * int64_t(tensor.itemsize());
    return at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

// Return an argument for a later run: views of device tensors, and the present content of host tensors.
c10::IValue argument_of(const c10::IValue &value)
{
    const auto one = [](const at::Tensor &tensor) {
        return tensor.defined() && tensor.is_cpu() ? tensor.detach().clone() : view_of(tensor);
    };
    if (value.isTensor())
        return one(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> views;
        for (const at::Tensor &tensor : value.toTensorVector())
            views.push_back(one(tensor));
        return views;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> views;
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorList())
            views.push_back(tensor ? std::optional<at::Tensor>(one(*tensor)) : std::nullopt);
        return views;
    }
    if (value.isDevice())
        return c10::Device(at::kCPU);
    return value;
}

// Put work into the current stream of a device; with `wait`, return when it ran and raise what it raised.
void submit(c10::DeviceIndex index, std::function<void()> work, bool wait)
{
    Device &one = device(index);
    check(one);
    auto timed = [&one, work = std::move(work)] {
        gpu_sleep(gpu_word(&one.gpu->operator_ns));
        const at::AutoDispatchBelowADInplaceOrView below;
        work();
    };
    Queue &queue = one.queue(stream_of(index));
    if (!wait) {
        queue.enqueue(std::move(timed));
        return;
    }
    auto error = std::make_shared<std::exception_ptr>();
    auto done = std::make_shared<Event>();
    const uint64_t place = done->put();
    queue.enqueue([timed, error, done, place] {
        try {
            timed();
        } catch (...) {
            *error = std::current_exception();
        }
        done->reach(place);
    });
    done->wait();
    if (*error)
        std::rethrow_exception(*error);
}

c10::Device device_of(const std::vector<c10::IValue> &arguments)
{
    for (const c10::IValue &value : arguments) {
        if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone())
            return value.toTensor().device();
        if (value.isTensorList())
            for (const at::Tensor &tensor : value.toTensorVector())
                if (tensor.defined() && tensor.is_privateuseone())
                    return tensor.device();
        if (value.isDevice() && value.toDevice().has_index())
            return value.toDevice();
    }
    return {TYPE, current};
}

// Return the tensors of the meta device that an operator would return, found by its shape function; none if it has none.
std::vector<at::Tensor> find_shapes(const c10::OperatorHandle &op, const std::vector<c10::IValue> &arguments)
{
    const auto shape = [](const at::Tensor &tensor) {
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
    };
    torch::jit::Stack stack;
    for (const c10::IValue &value : arguments) {
        if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
            stack.emplace_back(shape(value.toTensor()));
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> shapes;
            for (const at::Tensor &tensor : value.toTensorVector())
                shapes.push_back(shape(tensor));
            stack.emplace_back(shapes);
        } else if (value.isOptionalTensorList()) {
            return {}; // an index: its shape may depend on the content
        } else {
            stack.push_back(value);
        }
    }
    try {
        const at::AutoDispatchBelowADInplaceOrView below;
        op.callBoxed(stack);
    } catch (const c10::Error &) {
        return {}; // the run on the CPU raises what is wrong
    }
    std::vector<at::Tensor> shapes;
    for (const c10::IValue &value : stack)
        shapes.push_back(value.toTensor());
    return shapes;
}

// Return everything that the shapes of an operator's results depend on.
std::string call_of(const c10::OperatorHandle &op, const std::vector<c10::IValue> &arguments)
{
    std::ostringstream text;
    text << op.operator_name() << c10::get_default_dtype();
    const auto add = [&text](const at::Tensor &tensor) {
        if (tensor.defined())
            text << tensor.device().type() << tensor.dtype() << tensor.sizes() << tensor.strides()
                 << tensor.unsafeGetTensorImpl()->is_wrapped_number();
    };
    for (const c10::IValue &value : arguments) {
        text << ';';
        if (value.isTensor())
            add(value.toTensor());
        else if (value.isTensorList())
            for (const at::Tensor &tensor : value.toTensorVector())
                add(tensor);
        else if (!value.isOptionalTensorList())
            text << value;
    }
    return text.str();
}

// Return the device tensors that a functional operator will fill; none if its shape function does not tell. Most shape
// functions are Python's and take a millisecond, so each call is asked for once.
std::vector<at::Tensor> outputs_of(const c10::OperatorHandle &op, const std::vector<c10::IValue> &arguments, c10::Device place)
{
    thread_local std::unordered_map<std::string, std::vector<at::Tensor>> known;
    const std::string call = call_of(op, arguments);
    auto found = known.find(call);
    if (found == known.end())
        found = known.emplace(call, find_shapes(op, arguments)).first;
    std::vector<at::Tensor> outputs;
    for (const at::Tensor &tensor : found->second)
        outputs.push_back(!tensor.defined() ? tensor
                                            : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(place)));
    return outputs;
}

// Return what an operator returned on the CPU as tensors of the device.
c10::IValue result_of(const c10::IValue &value, c10::Device place)
{
    const auto one = [&](const at::Tensor &tensor) {
        if (!tensor.defined())
            return tensor;
        at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(place));
        if (tensor.numel())
            submit(place.index(), [to = view_of(copy), from = tensor] { to.copy_(from); }, false);
        return copy;
    };
    if (value.isTensor())
        return one(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> copies;
        for (const at::Tensor &tensor : value.toTensorVector())
            copies.push_back(one(tensor));
        return copies;
    }
    return value;
}

// Return whether an output was given without a size, so that the operator sets it.
bool may_grow(const c10::Argument &argument, const c10::IValue &value)
{
    return argument.is_out() && value.isTensor() && value.toTensor().defined() && !value.toTensor().numel();
}

// Run any operator that has no kernel below: in the stream if its results' shapes are known, else with a wait for it.
void run_operator(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const c10::FunctionSchema &schema = op.schema();
    const size_t count = schema.arguments().size(), first = stack->size() - count;
    const std::vector<c10::IValue> arguments(stack->begin() + std::ptrdiff_t(first), stack->end());
    const c10::Device place = device_of(arguments);
    const c10::DeviceGuard guard(place);

    // 1. Find out what the operator returns: its own arguments, new tensors of a known shape, or anything.
    std::vector<const at::Tensor *> changed; // the argument that each return value is, if it is one
    bool all_changed = true, all_new = !schema.returns().empty(), seeded = op.hasTag(at::Tag::nondeterministic_seeded);
    for (const c10::Argument &returned : schema.returns()) {
        const at::Tensor *same = nullptr;
        if (returned.alias_info()) {
            TORCH_CHECK(returned.alias_info()->isWrite(), "the simulated GPU has no kernel for the view ", schema.name());
            for (size_t index = 0; index < count; index++)
                if (arguments[index].isTensor() && schema.arguments()[index].alias_info() &&
                    *schema.arguments()[index].alias_info() == *returned.alias_info())
                    same = &arguments[index].toTensor();
        }
        changed.push_back(same);
        all_changed = all_changed && same;
        all_new = all_new && !returned.alias_info() && returned.type()->kind() == c10::TypeKind::TensorType;
    }
    for (size_t index = 0; index < count; index++) {
        seeded = seeded || schema.arguments()[index].type()->str() == "Generator?";
        if (may_grow(schema.arguments()[index], arguments[index]))
            all_changed = all_new = false;
    }
    std::vector<c10::IValue> views;
    for (size_t index = 0; index < count; index++) {
        views.push_back(argument_of(arguments[index]));
        if (may_grow(schema.arguments()[index], arguments[index]))
            views.back() = at::empty({0}, arguments[index].toTensor().options().device(at::kCPU));
    }

    // 2. Put it into the stream.
    if (all_changed && !seeded) {
        submit(place.index(), [op, views] { auto run = views; op.callBoxed(run); }, false);
        torch::jit::drop(*stack, count);
        for (const at::Tensor *tensor : changed)
            stack->emplace_back(*tensor);
        return;
    }
    if (all_new && !seeded && op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
        const std::vector<at::Tensor> outputs = outputs_of(op, arguments, place);
        if (!outputs.empty()) {
            std::vector<at::Tensor> targets;
            for (const at::Tensor &output : outputs)
                targets.push_back(view_of(output));
            submit(place.index(), [op, views, targets] {
                auto run = views;
                op.callBoxed(run);
                for (size_t index = 0; index < targets.size(); index++)
                    if (targets[index].defined() && targets[index].numel())
                        targets[index].copy_(run[index].toTensor());
            }, false);
            torch::jit::drop(*stack, count);
            for (const at::Tensor &output : outputs)
                stack->emplace_back(output);
            return;
        }
    }

    // 3. Or run it with a wait, and give outputs that got another shape their memory.
    auto run = std::make_shared<torch::jit::Stack>(views);
    submit(place.index(), [op, run, seeded, place] {
        std::optional<Draws> draws;
        if (seeded)
            draws.emplace(device(place.index()));
        op.callBoxed(*run);
    }, true);
    torch::jit::drop(*stack, count);
    for (size_t index = 0; index < changed.size(); index++) {
        if (!changed[index]) {
            stack->push_back(result_of((*run)[index], place));
            continue;
        }
        const at::Tensor &original = *changed[index], result = (*run)[index].toTensor();
        if (original.is_privateuseone() && result.numel() && result.data_ptr() != view_of(original).data_ptr()) {
            original.resize_(result.sizes());
            submit(place.index(), [to = view_of(original), from = result] { to.copy_(from); }, false);
        }
        stack->emplace_back(original);
    }
}

// Copy between the devices, or within one: it reads when it runs, at the rate of the link.
at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    const bool out = from.is_privateuseone() && !to.is_privateuseone();
    const bool crosses = out || (!from.is_privateuseone() && to.is_privateuseone());
    const c10::Device place = from.is_privateuseone() ? from.device() : to.device();
    Device &one = device(place.index());
    TORCH_CHECK(!gpu_fault(&one.gpu->fail_copy), "simulated GPU error: a copy failed");
    if (!to.numel() || (crosses && gpu_fault(&one.gpu->drop_copy)))
        return to;
    const at::Tensor &host = out ? to : from;
    const bool wait = crosses && !(non_blocking && is_pinned(host.data_ptr()));
    const c10::DeviceGuard guard(place);
    submit(place.index(), [&one, crosses, out, source = view_of(from), target = view_of(to)] {
        if (const int64_t rate = gpu_word(&one.gpu->bytes_per_s); crosses && rate) {
            std::lock_guard<std::mutex> lane(out ? one.to_host : one.to_device);
            gpu_sleep(int64_t(double(target.nbytes()) / double(rate) * 1e9));
        }
        target.copy_(source);
    }, wait);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to)
{
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> place, std::optional<bool>)
{
    const c10::DeviceGuard guard(place.value_or(at::Device(TYPE)));
    const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
    const size_t bytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, device_memory.allocate(bytes), &device_memory, true);
    at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
    return tensor;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> place, std::optional<bool> pin, std::optional<at::MemoryFormat> format)
{
    at::Tensor shape = at::empty(size, at::TensorOptions().device(at::kMeta).memory_format(format));
    return empty_strided(size, shape.strides(), dtype, layout, place, pin);
}

const at::Tensor &resize(const at::Tensor &tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format)
{
    at::Tensor shape = at::empty(size, at::TensorOptions().device(at::kMeta).memory_format(format));
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const size_t bytes = at::detail::computeStorageNbytes(size, shape.strides(), impl->itemsize(), size_t(impl->storage_offset()));
    if (bytes > impl->storage().nbytes())
        Hooks().resizePrivateUse1Bytes(impl->storage(), bytes);
    impl->set_sizes_and_strides(size, shape.strides());
    return tensor;
}

at::Tensor &set_storage(at::Tensor &tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride)
{
    std::vector<int64_t> dense(size.size(), 1);
    for (size_t index = size.size(); index-- > 1;)
        dense[index - 1] = dense[index] * std::max<int64_t>(size[index], 1);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride.empty() ? c10::IntArrayRef(dense) : stride, offset);
    return tensor;
}

at::Tensor &set_source(at::Tensor &tensor, c10::Storage storage)
{
    const int64_t count = int64_t(storage.nbytes() / tensor.itemsize());
    return set_storage(tensor, std::move(storage), 0, {count}, {1});
}

at::Tensor &set_tensor(at::Tensor &tensor, const at::Tensor &source)
{
    return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// A convolution of another device type than torch's own calls this one; the CPU has it under its common name.
at::Tensor convolution(const at::Tensor &input, const at::Tensor &weight, const std::optional<at::Tensor> &bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups)
{
    at::Tensor result;
    const std::optional<at::Tensor> shift = bias ? std::optional<at::Tensor>(view_of(*bias)) : std::nullopt;
    submit(input.device().index(), [&] {
        result = at::convolution(view_of(input), view_of(weight), shift, stride, padding, dilation, transposed, output_padding, groups);
    }, true);
    return result_of(result, input.device()).toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor &grad, const at::Tensor &input, const at::Tensor &weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask)
{
    std::tuple<at::Tensor, at::Tensor, at::Tensor> results;
    const std::vector<int64_t> bias{grad.size(1)};
    submit(input.device().index(), [&] {
        results = at::convolution_backward(view_of(grad), view_of(input), view_of(weight), bias, stride, padding, dilation,
                                           transposed, output_padding, groups, mask);
    }, true);
    const auto one = [&](const at::Tensor &tensor) { return result_of(tensor, input.device()).toTensor(); };
    return {one(std::get<0>(results)), one(std::get<1>(results)), one(std::get<2>(results))};
}

// The cell of an LSTM: the CPU has it as single operators only. `gates` keeps them for the way back.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor &input, const at::Tensor &hidden, const at::Tensor &cell,
                                                         const std::optional<at::Tensor> &input_bias,
                                                         const std::optional<at::Tensor> &hidden_bias)
{
    const at::Tensor sum = input_bias ? input + hidden + *input_bias + *hidden_bias : input + hidden;
    const at::Tensor output = at::empty_like(cell), next = at::empty_like(cell);
    submit(cell.device().index(), [gates = view_of(sum), before = view_of(cell), after = view_of(next), out = view_of(output)] {
        const std::vector<at::Tensor> part = gates.chunk(4, 1);
        part[0].sigmoid_(), part[1].sigmoid_(), part[2].tanh_(), part[3].sigmoid_();
        after.copy_(part[1] * before + part[0] * part[2]);
        out.copy_(part[3] * after.tanh());
    }, false);
    return {output, next, sum};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor> &grad_output,
                                                                  const std::optional<at::Tensor> &grad_next,
                                                                  const at::Tensor &cell, const at::Tensor &next,
                                                                  const at::Tensor &gates, bool has_bias)
{
    const at::Tensor of_output = grad_output && grad_output->defined() ? *grad_output : at::zeros_like(cell);
    const at::Tensor of_next = grad_next && grad_next->defined() ? *grad_next : at::zeros_like(cell);
    const at::Tensor of_gates = at::empty_like(gates), of_cell = at::empty_like(cell);
    submit(cell.device().index(), [gates = view_of(gates), before = view_of(cell), next = view_of(next),
                                   of_output = view_of(of_output), of_next = view_of(of_next), all = view_of(of_gates),
                                   of_cell = view_of(of_cell)] {
        const std::vector<at::Tensor> part = gates.chunk(4, 1);
        const auto sigmoid = [](const at::Tensor &value) { return value * (1 - value); }; // the slope
        const at::Tensor after = next.tanh(), grad = of_output * part[3] * (1 - after * after) + of_next;
        all.copy_(at::cat({grad * part[2] * sigmoid(part[0]), grad * before * sigmoid(part[1]),
                           grad * part[0] * (1 - part[2] * part[2]), of_output * after * sigmoid(part[3])}, 1));
        of_cell.copy_(grad * part[1]);
    }, false);
    return {of_gates, of_cell, has_bias ? of_gates.sum(0) : at::Tensor()};
}

// Run a collective of torch.distributed over the memory of the device, with a backend of the CPU such as gloo.
void run_collective(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const size_t count = op.schema().arguments().size();
    const std::vector<c10::IValue> arguments(stack->end() - std::ptrdiff_t(count), stack->end());
    torch::jit::drop(*stack, count);
    synchronize(device(device_of(arguments).index()));
    torch::jit::Stack run;
    for (size_t index = 0; index < count; index++) {
        const c10::IValue &value = arguments[index];
        if (op.schema().arguments()[index].type()->str() != "Tensor[][]") {
            run.push_back(value.isTensorList() || value.isTensor() ? argument_of(value) : value);
            continue;
        }
        c10::List<c10::List<at::Tensor>> lists;
        for (const c10::IValue &list : value.toListRef())
            lists.push_back(argument_of(list).toTensorList());
        run.emplace_back(lists);
    }
    op.callBoxed(run);
    run[1].toCustomClass<c10d::Work>()->wait();
    stack->push_back(arguments[0]);
    stack->push_back(run[1]);
}

void record_stream(at::Tensor &tensor, c10::Stream stream)
{
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// Return the memory at an address of a device as a tensor of bytes, which keeps nothing alive.
at::Tensor at_address(int64_t address, int64_t bytes, int64_t index)
{
    const c10::Device place(TYPE, c10::DeviceIndex(index));
    c10::DataPtr data(reinterpret_cast<void *>(address), nullptr, [](void *) {}, place);
    c10::Storage storage(c10::Storage::use_byte_size_t(), size_t(bytes), std::move(data), nullptr, false);
    at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(at::kByte));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(c10::IntArrayRef(bytes));
    return tensor;
}

TORCH_LIBRARY(simulated, m) { m.def("at_address(int address, int bytes, int index) -> Tensor", at_address); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::cpu::as_strided);
    m.impl("view", at::cpu::view);
    m.impl("unfold", at::cpu::unfold);
    m.impl("_reshape_alias", at::cpu::_reshape_alias);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage", set_source);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("convolution_overrideable", convolution);
    m.impl("convolution_backward_overrideable", convolution_backward);
    m.impl("record_stream", record_stream);
    m.impl("_thnn_fused_lstm_cell", lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

// Before the key that the device itself has: torch has taken that one, for backends of such a device.
TORCH_LIBRARY_IMPL(c10d, AutogradPrivateUse1, m)
{
    for (const char *name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_collective>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m)
{
    using namespace at::autocast;
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(layer_norm, fp32)
    KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

const int registered = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = DeviceMemory::used(); });
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return 0;
}();

} // namespace simulated

// --- functions for simulated_gpu.py (ctypes) ---------------------------------------------------------------------

extern "C" {

int simulated_create(const char *path) { return gpu_create(path); }
int simulated_initialized() { return simulated::DeviceMemory::used(); }
int simulated_forked() { return simulated::forked; }

// Pin host memory; return CUDA's code, which stays as this thread's last error.
int simulated_register(char *address, size_t bytes)
{
    using namespace simulated;
    Device &one = device(current);
    gpu_sleep(int64_t(bytes / 4096) * gpu_word(&one.gpu->pin_ns_per_page));
    int code = gpu_fault(&one.gpu->fail_registration) ? OUT_OF_MEMORY : 0;
    std::lock_guard<std::mutex> guard(pinned_mutex);
    const auto after = pinned.lower_bound(address + bytes);
    if (!code && after != pinned.begin() && std::prev(after)->first + std::prev(after)->second > address)
        code = ALREADY_REGISTERED;
    if (!code)
        pinned[address] = bytes;
    return code ? last_error = code : 0;
}

int simulated_unregister(char *address)
{
    using namespace simulated;
    device(current); // opens a context, as CUDA's does
    std::lock_guard<std::mutex> guard(pinned_mutex);
    return pinned.erase(address) ? 0 : (last_error = NOT_REGISTERED);
}

// Return the ranges of host memory that are pinned.
size_t simulated_pinned()
{
    std::lock_guard<std::mutex> guard(simulated::pinned_mutex);
    return simulated::pinned.size();
}

// Return this thread's last error and forget it, as cudaGetLastError.
int simulated_last_error() { return std::exchange(simulated::last_error, 0); }

// Forget the errors of earlier work: what only a new process does on a GPU.
void simulated_forget_errors()
{
    for (simulated::Device *one : simulated::devices()) {
        std::lock_guard<std::mutex> guard(one->mutex);
        one->error.clear();
    }
}

// Seed the random numbers of all devices.
void simulated_seed(uint64_t seed)
{
    for (simulated::Device *one : simulated::devices())
        one->random.set_current_seed(seed);
}

// Read or set the state of a device's random numbers; return its size.
size_t simulated_random(int index, char *state, int set)
{
    at::Generator &random = simulated::devices().at(size_t(index))->random;
    at::Tensor now = random.get_state();
    if (state && set) {
        std::memcpy(now.data_ptr(), state, now.nbytes());
        random.set_state(now);
    } else if (state) {
        std::memcpy(state, now.data_ptr(), now.nbytes());
    }
    return now.nbytes();
}

// Write the snapshot of all devices into `text`; return its length, which may be more than `size`.
size_t simulated_snapshot(char *text, size_t size)
{
    std::string all = "[";
    for (size_t index = 0; index < simulated::devices().size(); index++)
        all += (index ? "," : "") + simulated::devices()[index]->memory.snapshot(int(index));
    all += "]";
    if (all.size() < size)
        std::memcpy(text, all.c_str(), all.size() + 1);
    return all.size();
}
}
