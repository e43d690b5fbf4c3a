"""The service: a queue for shared servers, an API, and the page. The only importer of starlette and uvicorn."""
