"""The object store for adapter blocks: a folder or an S3 bucket."""

from .base import ObjectStore as ObjectStore
from .base import StoredObject as StoredObject
from .base import adapter_key as adapter_key
from .base import checkpoint_key as checkpoint_key
from .base import checkpoint_of_key as checkpoint_of_key
from .base import file_key as file_key
from .base import file_of_key as file_of_key
from .base import object_key as object_key
from .base import part_key as part_key
from .base import part_of_key as part_of_key
from .check import check_usable as check_usable
from .opening import open_store as open_store
