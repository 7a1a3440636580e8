
import contextlib
import torch.distributed as dist
from spmdtypes.capture.patches import patched
@contextlib.contextmanager
def scripting(fake, folder, note):
    c=dist.distributed_c10d
    with patched() as p:
        def init_process_group(*a, **k): pass
        def destroy_process_group(*a, **k): pass
        ng=c.new_group
        def new_group(ranks=None, timeout=None, backend=None, **k): return ng(ranks)
        p.everywhere(c.init_process_group, init_process_group)
        p.everywhere(c.destroy_process_group, destroy_process_group)
        p.everywhere(c.new_group, new_group)
        yield
