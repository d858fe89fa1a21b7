from django.urls import path

from basket import views

urlpatterns = [
    path("place/<int:number>", views.place),
    path("fail/<int:number>", views.fail),
    path("savepoint/<int:number>", views.savepoint),
    path("alone", views.alone),
    path("asynchronous", views.asynchronous),
    path("threaded/<int:number>", views.threaded),
]
