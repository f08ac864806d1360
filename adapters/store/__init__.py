"""Where adapters' blocks live for good: a folder, or a bucket behind the S3 protocol."""

from .base import ObjectStore as ObjectStore
from .base import StoredObject as StoredObject
from .base import adapter_key as adapter_key
from .base import object_key as object_key
from .check import check_usable as check_usable
from .opening import open_store as open_store
